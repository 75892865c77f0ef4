"""Who may ask, and how much may be sent: checked before anything is read of a body, and while it is read."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.server.errors import (
    BodyError,
    BodyTooLargeError,
    KeyRefusedError,
    SlowBodyError,
    UnknownHostError,
    error_response,
)
from outrider.server.settings import ServerSettings

GUARDED = ("/v1", "/tokenize", "/detokenize")
WITH_BODY = ("POST", "PUT", "PATCH")
DISCARDED, DISCARD_S = 64 << 20, 5.0  # bytes and seconds


class Guard:
    """Passes on what is allowed, with its whole body read. `state["owner"]` tells callers apart by their keys."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [_digest(key.encode()) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            scope.setdefault("state", {})["owner"] = self._owner(scope["path"], headers)
            if scope["method"] in WITH_BODY:
                body = await self._read(headers, receive)
                if body is None:
                    return  # the client is gone
                receive = _replay(body, receive)
        except OutriderError as error:
            if error.status == 413 and "expect" not in headers:  # who expects an answer first sends nothing before
                await _discard(receive)
            return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """A page elsewhere can have its own name point at this machine; it then calls us by that name."""
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower().strip("[]")
        if self._settings.hosts and host not in self._settings.hosts:
            raise UnknownHostError(
                f"this server is not known as {host!r:.100}; use {' or '.join(self._settings.hosts)}, "
                "or start it with that name allowed"
            )

    def _owner(self, path: str, headers: Headers) -> str:
        """Whose request it is: a name made of the key, "" where no keys are needed."""
        if not self._keys or not is_guarded(path):
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise KeyRefusedError("there is no API key; send it as 'Authorization: Bearer KEY'")
        digest = _digest(key.strip().encode("latin-1"))  # the bytes as they came
        if not _is_any(digest, self._keys):
            raise KeyRefusedError("this API key is not known; check it for typing errors")
        return digest.hex()[:32]

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body, or None when the client left meanwhile."""
        announced = headers.get("content-length", "0")
        if not announced.isascii() or not announced.isdigit():
            raise BodyError(f"Content-Length takes a number, got {announced!r:.40}")
        self._check_size(int(announced[:20]))
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._check_size(size)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise SlowBodyError(
                f"the body did not come within {self._settings.body_timeout_s:g} s; send it faster, or less"
            ) from None

    def _check_size(self, size: int) -> None:
        if size > self._settings.max_body:
            raise BodyTooLargeError(f"the body is larger than {self._settings.max_body} bytes; send less")


async def _discard(receive: Receive) -> None:
    """Drop the rest of a body, within reason: many clients read the answer only when they have sent everything."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while size < DISCARDED:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def is_guarded(path: str) -> bool:
    """Whether a path needs a key."""
    return any(path == root or path.startswith(f"{root}/") for root in GUARDED)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_any(digest: bytes, known: Sequence[bytes]) -> bool:
    """Compares with all of them, in a time that tells nothing about which one is near."""
    found = False
    for one in known:
        found |= hmac.compare_digest(digest, one)
    return found


def _replay(body: bytes, receive: Receive) -> Receive:
    """A channel that gives the body first, and then whatever the server says: that the client left."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return first.pop() if first else await receive()

    return read
