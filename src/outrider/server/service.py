"""What the paths share: the worker, the settings, and how bodies are read."""

from __future__ import annotations

import asyncio
import re
import time

from starlette.requests import Request
from starlette.responses import Response

from outrider.errors import OutriderError, RequestError
from outrider.server.errors import BodyError, error_response
from outrider.server.ledger import Entry
from outrider.server.parse import Body, parse
from outrider.server.settings import ServerSettings
from outrider.server.spelling import Spelling
from outrider.server.worker import Worker

LIGHT = 1 << 15  # bytes of a body that are parsed at once; more would keep others waiting, and go to a thread
SMALL = 1 << 11  # bytes of a body that are encoded and handed over at once: a thread would take longer
_NAME = re.compile("[A-Za-z0-9._-]{1,64}")
_JSON = re.compile(r"application/(json|[\w.+-]+\+json)\s*(;.*)?", re.IGNORECASE)


class Service:
    """A worker behind HTTP."""

    def __init__(self, worker: Worker, settings: ServerSettings) -> None:
        self.worker = worker
        self.settings = settings
        self.spelling = Spelling(worker.engine.tokenizer)
        self.created = int(time.time())

    async def body(self, model: type[Body], request: Request) -> Body:
        """The request's body, or a RequestError."""
        kind = request.headers.get("content-type", "")
        if not _JSON.fullmatch(kind.strip()):
            said = f"got {kind!r:.60}" if kind else "there is none"
            raise BodyError(f"the Content-Type must be application/json, {said}; set that header")
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            raise BodyError(f"the Content-Encoding {coding!r:.40} is not read; send the body as it is")
        raw = await request.body()
        request.state.is_small = len(raw) <= SMALL
        return parse(model, raw) if len(raw) <= LIGHT else await asyncio.to_thread(parse, model, raw)

    def why_not_ready(self) -> str:
        error = self.worker.error
        if error is None:
            return "the server is starting or shutting down; try again in a moment"
        said = error.message if isinstance(error, OutriderError) else type(error).__name__
        return f"the engine has died ({said}); the server must be started again"

    async def refuse(self, request: Request, error: Exception) -> Response:
        """The answer to a request that failed. Whoever is told to come back waits about as long as an answer takes."""
        assert isinstance(error, OutriderError), "registered for nothing else"
        return error_response(error, wait_s=self.worker.engine.metrics.latency.quantile(0.5))


def owner_of(request: Request) -> str:
    """Whose requests the caller may see: those of its key, or of all clients where there are no keys."""
    return str(request.state.owner)


def entry_of(request: Request) -> Entry:
    """What the log will say of the request."""
    entry = request.state.entry
    assert isinstance(entry, Entry), f"the ledger left {entry!r}"
    return entry


def name_of(request: Request) -> str | None:
    """What the client calls its request, if anything."""
    name = request.headers.get("x-request-id")
    if name is not None and not _NAME.fullmatch(name):
        raise RequestError(
            f"X-Request-Id takes 1 to 64 letters, digits, dots, dashes and underscores, got {name!r:.80}",
            param="X-Request-Id",
        )
    return name
