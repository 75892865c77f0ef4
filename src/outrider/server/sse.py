"""Server-sent events: an answer as it is made, one chunk per round.

The head goes out at once. A client that leaves, or does not read for too long, ends its requests within a round. When
nothing came for a while, a comment keeps proxies from closing the connection. An error is the last thing in a stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.server.answers import Answers, Json
from outrider.server.errors import UnexpectedError, error_body
from outrider.server.reading import cancel_all, departure, rounds
from outrider.server.ticket import Ticket

log = logging.getLogger("outrider.server")

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": still working\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
FIRST = asyncio.FIRST_COMPLETED
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class EventStream(Response):
    """The response of a streamed call: one task writes, and this one watches.

    `explain` puts an error into the caller's words; `when_over` is told once, at the end.
    """

    def __init__(
        self,
        answers: Answers,
        tickets: Sequence[Ticket],
        *,
        send_timeout_s: float,
        headers: dict[str, str],
        explain: Callable[[OutriderError], OutriderError],
        when_over: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**HEADERS, **headers, "Content-Type": "text/event-stream; charset=utf-8"})
        self._answers = answers
        self._tickets = tickets
        self._send_timeout_s = send_timeout_s
        self._explain = explain
        self._when_over = when_over
        self._is_gone = False  # the client
        self._is_quiet = True  # nothing was written since the watch looked
        self._writing_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._answer(send))
        gone = asyncio.create_task(departure(receive))
        try:
            await self._watch(writing, gone, send)
        except TimeoutError:
            self._leave("does not read")
        finally:
            cancel_all(self._tickets)
            writing.cancel()
            gone.cancel()
            self._when_over()

    async def _watch(self, writing: asyncio.Task[None], gone: asyncio.Task[None], send: Send) -> None:
        """Until everything is written: notice that the client leaves or stops reading, and fill long silences."""
        clock, tick_s = asyncio.get_running_loop().time, min(KEEP_ALIVE_S, self._send_timeout_s)
        while True:
            self._is_quiet = True
            await asyncio.wait({writing} if self._is_gone else {writing, gone}, timeout=tick_s, return_when=FIRST)
            if writing.done():
                return writing.result()
            if gone.done() and not self._is_gone:
                self._leave("left")
            elif self._writing_since is not None and clock() - self._writing_since >= self._send_timeout_s:
                return self._leave("does not read")
            elif self._is_quiet and self._writing_since is None:
                async with asyncio.timeout(self._send_timeout_s):
                    await self._write(send, _body(KEEP_ALIVE))

    def _leave(self, why: str) -> None:
        log.info("the client of %s %s; its requests end", self._answers.asked.id, why)
        self._is_gone = True
        cancel_all(self._tickets)

    async def _answer(self, send: Send) -> None:
        """The head, the chunks, and the end or an error."""
        await self._write(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for chunk in self._answers.opening():
            await self._write(send, _body(_data(chunk)))
        try:
            async with aclosing(rounds(self._tickets)) as events:
                async for index, event in events:
                    added = self._answers.chunk(index, event)
                    if added is not None and not self._is_gone:
                        await self._write(send, _body(_data(added)))
        except OutriderError as error:
            await self._write(send, _body(_data(error_body(self._explain(error))), is_last=True))
        except Exception:
            log.exception("a stream failed")
            await self._write(send, _body(_data(error_body(UnexpectedError())), is_last=True))
        else:
            rest = b"".join(_data(chunk) for chunk in self._answers.closing())
            await self._write(send, _body(rest + DONE, is_last=True))

    async def _write(self, send: Send, message: Json) -> None:
        """Send, unless the client is gone."""
        if self._is_gone:
            return
        self._is_quiet = False
        self._writing_since = asyncio.get_running_loop().time()
        try:
            await send(message)
        except OSError:  # how a server may say that the connection is closed
            self._leave("left")
        finally:
            self._writing_since = None


def _data(chunk: Json) -> bytes:
    return f"data: {_encode(chunk)}\n\n".encode()


def _body(data: bytes, *, is_last: bool = False) -> Json:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
