"""Look at every page of the built documentation in a browser: `python -m tests.docs.browser [FOLDER OF SCREENSHOTS]`.

It takes Chromium and playwright (`make docs-browser`). At three widths, light and dark, no page may scroll sideways,
log an error, or have text of too little contrast (WCAG AA: 4.5, large text 3).
"""

from __future__ import annotations

import functools
import http.server
import sys
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.docs.pages import ROOT

BUILT = ROOT / "build" / "docs"
CHROMIUM = "/usr/bin/chromium"
WIDTHS = (390, 768, 1440)
# for each text: its colour over the background of the closest ancestor that has one
CONTRAST = """() => {
  const channels = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = c => { const v = c / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const behind = node => {
    for (let n = node; n; n = n.parentElement) {
      const c = channels(getComputedStyle(n).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const found = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    const visible = parent.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!walker.currentNode.data.trim() || !visible) continue;
    const style = getComputedStyle(parent), size = parseFloat(style.fontSize);
    const [a, b] = [luminance(channels(style.color)), luminance(behind(parent))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const needed = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const what = `${parent.tagName}.${parent.className} ${style.color} on ${behind(parent)}: ${ratio.toFixed(2)}`;
    if (ratio < needed) found.set(what, walker.currentNode.data.trim().slice(0, 40));
  }
  return [...found].map(([what, text]) => `contrast of ${what} (${text})`);
}"""
OVERFLOW = """() => {
  const wide = document.documentElement.scrollWidth, room = document.documentElement.clientWidth;
  return wide > room ? [`${wide} px wide in ${room}`] : [];
}"""


def check(page: Page, address: str, shots: Path | None, name: str) -> list[str]:
    """Open a page, look at it in each theme and width, and return its faults."""
    logged: list[str] = []
    page.on("console", lambda message: logged.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: logged.append(str(error)))
    found: list[str] = []
    page.goto(address, wait_until="load")
    for theme in ("light", "dark"):
        page.evaluate("theme => { document.body.dataset.theme = theme; }", theme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            where = f"{name}, {theme}, {width} px"
            found += [f"{where}: {fault}" for fault in page.evaluate(OVERFLOW)]
            if width == WIDTHS[-1]:
                found += [f"{where}: {fault}" for fault in page.evaluate(CONTRAST)]
            if shots is not None and theme == "light":
                page.screenshot(path=shots / f"{name.replace('/', '-')}-{width}.png")
    return found + [f"{name}: console: {line}" for line in logged]


def main() -> None:
    """Check every page; exit with 1 if there are faults."""
    shots = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if shots is not None:
        shots.mkdir(parents=True, exist_ok=True)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=BUILT))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = sorted(str(path.relative_to(BUILT)) for path in BUILT.rglob("*.html"))
    faults = []
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        for name in pages:
            page = browser.new_page()
            faults += check(page, f"http://127.0.0.1:{server.server_port}/{name}", shots, name)
            page.close()
        browser.close()
    server.shutdown()
    print(*faults, sep="\n")
    print(f"{len(pages)} pages, {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
