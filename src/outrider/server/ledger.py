"""One line in the log and one count for every HTTP request, and an answer when the unexpected happens.

The line has no text of prompts or answers, and no keys.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.errors import UnexpectedError, error_response
from outrider.server.metrics import HttpMetrics

log = logging.getLogger("outrider.server")
QUIET = ("/health", "/health/live", "/health/ready", "/metrics")  # asked every few seconds: not worth a line
GONE = 499  # counted where the client left before there was an answer, as proxies do


@dataclass(slots=True)
class Entry:
    """What an endpoint tells of its request."""

    id: str | None = None
    user: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    acceptance: float | None = None

    def words(self) -> str:
        told = {
            "id": self.id,
            "user": None if self.user is None else json.dumps(self.user),  # nobody writes lines of their own
            "prompt": self.prompt_tokens,
            "completion": self.completion_tokens,
            "acceptance": None if self.acceptance is None else f"{self.acceptance:.2f}",
        }
        return "".join(f" {name}={value}" for name, value in told.items() if value is not None)


class Ledger:
    """The outermost layer. Endpoints find their entry as `request.state.entry`. `paths` are those that exist."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, paths: Collection[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        entry, status, started = Entry(), GONE, time.perf_counter()
        scope.setdefault("state", {})["entry"] = entry

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            log.exception("%s %s failed", scope["method"], self._path(scope))
            if status == GONE:  # nothing was sent
                await error_response(UnexpectedError())(scope, receive, watched)
        finally:
            path = self._path(scope)
            self._metrics.count(path, status)
            level = logging.DEBUG if path in QUIET else logging.INFO
            seconds = time.perf_counter() - started
            log.log(level, "%s %s %d %.3fs%s", scope["method"], path, status, seconds, entry.words())

    def _path(self, scope: Scope) -> str:
        """The route's own path: what callers make up must not become labels."""
        if "route" in scope:
            return str(scope["route"].path)
        return scope["path"] if scope["path"] in self._paths else "other"
