"""Chromium for tests, driven by playwright. In CI a missing browser fails the tests; at home it skips them, loudly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip


def find_chromium() -> str:
    """Path of a Chromium: the variable CHROMIUM, or the first one on the path."""
    found = os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        what = "these tests need Chromium: apt-get install -y --no-install-recommends chromium, or set CHROMIUM=path"
        if os.environ.get("CI"):
            raise AssertionError(what)
        pytest.skip(what)
    return found


class Page:
    """A page and everything it complained about or asked the network for.

    Attributes:
        page: playwright's page.
        problems: console errors, uncaught exceptions, and requests that are no file.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", self._check_request)

    def _check_request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.problems.append(f"request: {request.url}")

    def open(self, path: Path) -> None:
        """Load a file."""
        self.page.goto(path.resolve().as_uri())

    def draw_all(self) -> int:
        """Scroll through the page until every plot is drawn; how many there are."""
        count = self.page.locator("[data-figure]").count()
        for number in range(count):
            holder = self.page.locator("[data-figure]").nth(number)
            holder.scroll_into_view_if_needed()
            self.page.wait_for_function("holder => holder.dataset.drawn === 'yes'", arg=holder.element_handle())
        return count


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium that is closed in the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        try:
            yield started
        finally:
            started.close()
