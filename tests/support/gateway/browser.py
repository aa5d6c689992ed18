"""A headless browser for tests of the page; tests are skipped where there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import HANG_S, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Visit:
    """A page, and what the browser reported of it: messages, and addresses of requests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.messages: list[str] = []
        self.addresses: list[str] = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.addresses.append(request.url))

    def keep_picture(self, name: Any) -> None:
        """Write a picture of the page where CI keeps its artefacts."""
        if folder := os.environ.get("LORADOCK_ARTIFACTS"):
            self.page.screenshot(path=Path(folder) / f"{name}.png")

    def wait_for(self, condition: Any) -> None:
        """Wait until a JavaScript expression is true; the page's policy allows no other way."""
        wait_until(lambda: self.page.evaluate(condition), what=condition)


@contextmanager
def browser() -> Iterator[object]:
    """Run a browser; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


@contextmanager
def visit(running: Any, url: str, **options: Any) -> Iterator[Visit]:
    """Open a page in a context of its own."""
    context = running.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(1000 * HANG_S)
    visited = Visit(page)
    page.goto(url)
    try:
        yield visited
    finally:
        context.close()
