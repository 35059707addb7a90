"""The process that serves the page of a run: it reads updates from its standard input, and ends when that ends."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from aioenv.watching.messages import PageUpdate, Setup, read

__all__ = ["main"]

_HOST = "127.0.0.1"
# The CPUs belong to the run.
_NICE = 19
# Without a visitor the page is kept up to date so often, in seconds.
_UNSEEN_S = 1.0


def main() -> None:
    """Serve the page until standard input ends; the first line of standard output tells its address, or an error."""
    answers = open(os.dup(1), "w", encoding="utf-8")
    updates = open(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # viser prints
        os.dup2(nothing, fd)
    if hasattr(os, "nice"):
        os.nice(_NICE)
    logging.getLogger("websockets").setLevel(logging.CRITICAL)  # browsers open connections that they don't use

    def answer(**what: object) -> None:
        try:
            print(json.dumps(what), file=answers, flush=True)
        except OSError:  # the run has closed the page
            pass

    setup: Setup | None = read(updates)
    if setup is None:
        return
    try:
        page = _Page(setup, lambda count: answer(visitors=count))
    except OSError as exc:
        answer(errno=exc.errno, error=exc.strerror or str(exc))
        return
    except Exception as exc:
        answer(error=f"{type(exc).__name__}: {exc}")
        raise
    answer(url=page.url)

    def receive() -> None:
        while (update := read(updates)) is not None:
            page.put(update)
        os._exit(0)  # the threads of viser have nothing to finish

    threading.Thread(target=receive, name="updates", daemon=True).start()
    page.run()


class _Page:
    """The page.

    Args:
        setup: what it shows.
        on_visitors: called with the number of browsers that show it, when it has changed.

    Attributes:
        url: its address.

    Raises:
        OSError: if the port is taken, or not for this user.
    """

    def __init__(self, setup: Setup, on_visitors: Callable[[int], None]) -> None:
        import viser
        from viser import _messages

        from aioenv.watching.scene import ImageTiles, MujocoTiles

        with socket.socket() as probe:  # viser would take the next port that is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, setup.port))
        self._server = server = viser.ViserServer(_HOST, setup.port, label=setup.title, verbose=False)
        for request in (_messages.ShareUrlRequest, _messages.ShareUrlDisconnect):
            # any visitor could else make the page public
            server._websock_server.unregister_handler(request)
        self.url = f"http://{_HOST}:{server.get_port()}"
        server.gui.configure_theme(dark_mode=True, show_logo=False, show_share_button=False)
        self._text = server.gui.add_markdown("…")
        self._tiles = MujocoTiles(server, setup) if setup.sources else ImageTiles(server, setup)
        self._arrival = threading.Condition()
        self._update: PageUpdate | None = None
        self._on_visitors = on_visitors
        server.on_client_connect(self._count)
        server.on_client_disconnect(self._count)

    def _count(self, client: object) -> None:
        with self._arrival:
            self._on_visitors(len(self._server.get_clients()))
            self._arrival.notify()

    def put(self, update: PageUpdate) -> None:
        """Show an update, unless a newer one comes before."""
        with self._arrival:
            if (before := self._update) is not None:  # what is sent once must not be lost
                update = update._replace(
                    new={**before.new, **update.new},
                    images={**before.images, **update.images},
                    summary=update.summary or before.summary,
                )
            self._update = update
            self._arrival.notify()

    def run(self) -> None:
        """Show updates for ever."""
        shown_s = 0.0
        while True:
            with self._arrival:
                while self._update is None:
                    self._arrival.wait()
                if not self._server.get_clients() and time.monotonic() - shown_s < _UNSEEN_S:
                    self._arrival.wait(_UNSEEN_S)
                    if not self._server.get_clients() and time.monotonic() - shown_s < _UNSEEN_S:
                        continue
                update, self._update = self._update, None
            shown_s = time.monotonic()
            with self._server.atomic():
                self._tiles.show(update)
            if update.summary:
                rows = (f"| {name} | {value} |" for name, value in update.summary.items())
                self._text.content = "\n".join(["| | |", "|---|---|", *rows])
