"""A server process, and a headless Chromium that visits its page. CHROMIUM names the browser, else PATH has it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

Body = dict[str, Any]
COMPLETIONS = "**/v1/chat/completions"
REFUSED = "Failed to load resource"  # Chromium's own note on every answer that is no success


@contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    """The address of a new server process, which ends with the block."""
    program = "from outrider.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", model, "--port", "0", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        address = re.search(r"http://\S+?:\d+", said)
        assert address, f"the server did not say where it listens: {said!r}"
        yield address[0]
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextmanager
def chromium() -> Iterator[Any]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium here; install it, or name it with CHROMIUM=path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page that is open, with what it asked for and what it complained about."""

    page: Any
    address: str
    hosts: set[str] = field(default_factory=set)
    bodies: list[Body] = field(default_factory=list)  # of the completions it asked for
    complaints: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("request", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)

    def _note(self, request: Any) -> None:
        self.hosts.add(request.url.split("/")[2])
        if request.method == "POST":
            self.bodies.append(json.loads(request.post_data))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def check(self) -> None:
        """No complaint, and nothing asked from another host."""
        own = self.address.removeprefix("http://")
        assert self.hosts == {own}, f"the page asked {self.hosts - {own}}"
        assert not self.complaints, self.complaints

    def forgive_refusals(self) -> None:
        """The server was meant to refuse: the browser's note on it is no fault of the page."""
        self.complaints = [text for text in self.complaints if not text.startswith(REFUSED)]

    def change_bodies(self, change: Callable[[Body], Body]) -> None:
        """Let the server see other requests than the page sends."""

        def handle(route: Any) -> None:
            route.continue_(post_data=json.dumps(change(json.loads(route.request.post_data))))

        self.page.route(COMPLETIONS, handle)

    def reply(self, *chunks: Body, end: str = "data: [DONE]\n\n") -> None:
        """Answer in the server's place."""
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end
        self.page.unroute(COMPLETIONS)
        self.page.route(COMPLETIONS, lambda route: route.fulfill(body=body, content_type="text/event-stream"))

    def make_long(self) -> None:
        """Answers that only end when they are stopped, or after thousands of tokens."""
        self.change_bodies(lambda body: {**body, "ignore_eos": True, "max_tokens": 3000})

    def set(self, **values: object) -> None:
        """Fill in settings; the panel is opened where it is not."""
        if not self.page.locator("#settings").is_visible():
            self.page.click("#open-settings")
        for name, value in values.items():
            control = self.page.locator(f"#set-{name.replace('_', '-')}")
            if control.evaluate("node => node.tagName") == "SELECT":
                control.select_option(str(value))
            else:
                control.fill(str(value))
        self.page.click("#close-settings")

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def ask(self, text: str) -> str:
        """Send, and wait for the whole answer."""
        ends = self.page.locator(".turn-end")
        before = ends.count()
        self.send(text)
        ends.nth(before).wait_for()
        return self.answer()

    def answer(self) -> str:
        return self.page.locator(".answer .answer-text").last.evaluate("node => node.textContent")

    def wait_for_growth(self, text: str, *, beyond: int = 0) -> str:
        """What is in the newest answer once it is longer than `beyond` and than `text`."""
        least = max(beyond, len(text))
        newest = "[...document.querySelectorAll('.answer-text')].at(-1)"
        self.until(f"{newest}?.textContent.length > {least}")
        return self.answer()

    def until(self, expression: str, timeout_s: float = 15.0) -> None:
        """Wait for it to be true. Asked from here: waiting inside the page needs eval, which its policy forbids."""
        end = time.monotonic() + timeout_s
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"waited in vain for {expression}"
            self.page.wait_for_timeout(25)

    def overflow(self) -> int:
        return self.page.evaluate("document.scrollingElement.scrollWidth - innerWidth")
