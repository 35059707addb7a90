"""Copies of tensors between the CPU and a device, with or without streams; see `aioenv.adapters.torch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["DirectTransfer", "StreamTransfer", "Streams", "transfer_to"]


class DirectTransfer:
    """Copies while the caller waits; tensors that are on the device already are not copied.

    Args:
        device: a `torch.device`.
    """

    def __init__(self, device: Any) -> None:
        self.device = device

    def upload(self, name: str, source: Any, dtype: Any) -> Any:
        """Return a tensor of the CPU on the device, in this dtype; see `StreamTransfer.upload`."""
        return source.to(self.device, dtype)

    def download(self, sources: Sequence[Any]) -> tuple[list[Any], None]:
        """Return tensors on the CPU; see `StreamTransfer.download`."""
        return [source.cpu() for source in sources], None


class StreamTransfer:
    """Copies through pinned memory, without waiting: uploads run on a stream of their own.

    Each name has two buffers of pinned memory, used in turn. So an upload goes on while the next batch arrives, and at
    most two are under way.

    Args:
        device: a `torch.device`.
        streams: the stream calls of the device.
    """

    def __init__(self, device: Any, streams: Streams) -> None:
        self.device = device
        self._streams = streams
        self._buffers: dict[
            Any, list[Any]
        ] = {}  # by name, shape of a row and dtype: memory and its last upload's event

    def upload(self, name: str, source: Any, dtype: Any) -> Any:
        """Begin to copy a tensor of the CPU, whose memory may be changed at once.

        Args:
            name: names the buffers.
            source: of shape `(n, …)`.
            dtype: converted to on the way into the pinned memory.

        Returns:
            A new tensor on the device. Work on the current stream waits for it there, the CPU does not.
        """
        shape = tuple(source.shape)
        buffers = self._buffers.setdefault((name, shape[1:], dtype), [])
        memory = None
        if len(buffers) == 2:
            memory, event = buffers.pop(0)
            event.synchronize()
        if memory is None or len(memory) < shape[0]:
            with torch.inference_mode(False):  # else it could not be written to outside of that mode
                memory = self._streams.pinned(shape, dtype)
        pinned = memory[: shape[0]]
        pinned.copy_(source)
        copied, event = self._streams.upload(pinned)
        buffers.append((memory, event))
        return copied

    def download(self, sources: Sequence[Any]) -> tuple[list[Any], Any]:
        """Begin to copy tensors to the CPU, in one go.

        Returns:
            The copies, and the event (`query`, `synchronize`) from which on they may be read; None: they may be read
            now.
        """
        copies = [one if one.device.type == "cpu" else self._streams.download(one) for one in sources]
        pending = any(copy is not source for copy, source in zip(copies, sources, strict=True))
        return copies, self._streams.record() if pending else None


class Streams:
    """The stream calls of a device, as `torch.cuda` and `torch.xpu` have them.

    Args:
        device: a `torch.device`.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._uploads = self._module.Stream(device)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an uninitialised tensor in pinned memory."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def upload(self, pinned: Any) -> tuple[Any, Any]:
        """Begin a copy on the upload stream, for which the current stream waits; return it and the event of its end."""
        current = self._module.current_stream(self._device)
        with self._module.stream(self._uploads):
            copied = pinned.to(self._device, non_blocking=True)
            event = self._event(self._uploads)
        current.wait_event(event)
        copied.record_stream(current)  # or its memory could be used again while the current stream reads it
        return copied, event

    def download(self, source: Any) -> Any:
        """Begin a copy to new pinned memory on the current stream; `record` gives the event of its end."""
        copied = self.pinned(tuple(source.shape), source.dtype)
        return copied.copy_(source, non_blocking=True)

    def record(self) -> Any:
        """Return an event of the end of all work that is queued on the current stream."""
        return self._event(self._module.current_stream(self._device))

    def _event(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event


def transfer_to(device: Any) -> DirectTransfer | StreamTransfer:
    """Return the transfer for a device: with streams for those that have pinned memory and streams."""
    if device.type in ("cuda", "xpu"):
        return StreamTransfer(device, Streams(device))
    return DirectTransfer(device)
