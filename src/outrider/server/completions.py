"""/v1/chat/completions and /v1/completions: from a body to an answer, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.errors import OutriderError
from outrider.server.answers import WHOLE, Answers
from outrider.server.description import ASKING, answers, takes
from outrider.server.kept import Record
from outrider.server.ledger import GONE, Entry
from outrider.server.memory import tenant_for
from outrider.server.reading import results_of
from outrider.server.schema import ChatBody, CompletionBody
from outrider.server.service import Service, entry_of, name_of, owner_of
from outrider.server.sse import EventStream
from outrider.server.ticket import Ticket
from outrider.server.translate import Asked, in_callers_words, read_request


def routes(service: Service) -> APIRouter:
    router = APIRouter(responses={200: answers(), **ASKING})

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatBody))
    async def chat(request: Request) -> Response:
        """The assistant's next turn."""
        return await _answer(service, request, await service.body(ChatBody, request))

    @router.post("/v1/completions", openapi_extra=takes(CompletionBody))
    async def complete(request: Request) -> Response:
        """How a prompt goes on."""
        return await _answer(service, request, await service.body(CompletionBody, request))

    return router


async def _answer(service: Service, request: Request, body: ChatBody | CompletionBody) -> Response:
    owner, entry = owner_of(request), entry_of(request)
    is_small: bool = request.state.is_small
    tenant = tenant_for(owner, service.settings)
    read = partial(read_request, body, service.worker.engine, service.settings, name=name_of(request), tenant=tenant)
    asked = read() if is_small else await asyncio.to_thread(read)
    entry.id, entry.user = asked.id, asked.user
    answering, headers = Answers(asked, service.spelling), {"X-Request-Id": asked.id}
    try:
        tickets = await _submit(service, asked, owner, at_once=is_small)
        if asked.stream:
            return EventStream(
                answering,
                tickets,
                send_timeout_s=service.settings.send_timeout_s,
                headers=headers,
                explain=lambda error: in_callers_words(error, body),
                when_over=lambda: _tell(entry, answering),
            )
        results = await results_of(tickets, request.receive)
    except OutriderError as error:
        raise in_callers_words(error, body) from None
    if results is None:
        return Response(status_code=GONE)
    whole = answering.whole(results)
    _tell(entry, answering)
    return JSONResponse(whole, headers=headers)


async def _submit(service: Service, asked: Asked, owner: str, *, at_once: bool) -> Sequence[Ticket]:
    """Hand the requests to the engine, and remember them for those who ask later."""
    kept = service.worker.kept
    with kept.reserving(asked.id, owner):
        tickets = await service.worker.submit(asked.requests, at_once=at_once)
        record = Record(
            id=asked.id,
            kind=WHOLE[asked.kind],
            tenant=owner,
            user=asked.user,
            created=int(time.time()),
            choices=list(tickets),
        )
        kept.add(record)
    return tickets


def _tell(entry: Entry, answering: Answers) -> None:
    """What the log says of an answer, also of half a one."""
    told = answering.usage()
    entry.prompt_tokens, entry.completion_tokens = told["prompt_tokens"], told["completion_tokens"]
    if told["speculation"] is not None:
        entry.acceptance = told["speculation"]["acceptance_rate"]
