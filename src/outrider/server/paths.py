"""The small paths: models, figures, requests by id, tokens, health, metrics and the page."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.engine.engine import Engine
from outrider.errors import NotReadyError, RequestError
from outrider.server.description import LOOKING, errors, gives, takes
from outrider.server.errors import UnknownRequestError, error_response
from outrider.server.figures import steady
from outrider.server.files import INDEX, file_response, load_files
from outrider.server.metrics import CONTENT_TYPE, HttpMetrics, exposition
from outrider.server.schema import DetokenizeBody, TokenizeBody
from outrider.server.service import Service, owner_of
from outrider.server.translate import check_model, conversation
from outrider.tokenizer.base import ChatTokenizer

Json = dict[str, Any]
TOKENIZING = errors(400, 401, 404, 408, 413, 500)


def lookups(service: Service) -> APIRouter:
    """What clients may want to know."""
    router, worker = APIRouter(responses=LOOKING), service.worker

    def card() -> Json:
        engine = worker.engine
        return {
            "id": service.settings.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "outrider",
            "context": engine.context,
            "methods": list(engine.methods),
            "method": engine.method,
            "chat": _has_chat(engine),
        }

    @router.get("/v1/models", responses={200: gives("object", "data")})
    async def models() -> Response:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}", responses={200: gives("id", "object"), **errors(404)})
    async def model(name: str) -> Response:
        """The same by its name."""
        check_model(name, service.settings)
        return JSONResponse(card())

    @router.get("/v1/statistics", responses={200: gives("speculation", "serving")})
    async def statistics() -> Response:
        """What speculation and serving came to since the start."""
        engine = worker.engine
        return JSONResponse(
            {
                "speculation": steady(engine.statistics.report),
                "serving": steady(lambda: engine.metrics.report(engine.clock.now())),
            }
        )

    @router.get("/v1/requests/{request_id}", responses={200: gives("id", "status", "choices"), **errors(404)})
    async def find(request_id: str, request: Request) -> Response:
        """A request of yours, while it runs and for a while afterwards."""
        found = worker.kept.find(request_id, owner_of(request))
        if found is None:
            raise _no_request(request_id)
        return JSONResponse(found)

    @router.delete("/v1/requests/{request_id}", responses={200: gives("id", "object", "cancelled"), **errors(404)})
    async def cancel(request_id: str, request: Request) -> Response:
        """End a request of yours within a round."""
        if not worker.kept.cancel(request_id, owner_of(request)):
            raise _no_request(request_id)
        return JSONResponse({"id": request_id, "object": "request", "cancelled": True})

    return router


def tokens(service: Service) -> APIRouter:
    """Text to ids and back."""
    router, engine = APIRouter(responses=TOKENIZING), service.worker.engine

    @router.post("/tokenize", openapi_extra=takes(TokenizeBody), responses={200: gives("tokens", "count", "context")})
    async def tokenize(request: Request) -> Response:
        """The ids of a prompt, or of a conversation as the model reads it."""
        body = await service.body(TokenizeBody, request)
        check_model(body.model, service.settings)
        ids = await asyncio.to_thread(_encode, body, engine)
        return JSONResponse({"tokens": ids, "count": len(ids), "context": engine.context})

    @router.post("/detokenize", openapi_extra=takes(DetokenizeBody), responses={200: gives("prompt")})
    async def detokenize(request: Request) -> Response:
        """The text of ids; special tokens add nothing to it."""
        body = await service.body(DetokenizeBody, request)
        check_model(body.model, service.settings)
        text = await asyncio.to_thread(service.spelling.text, body.tokens, engine.info.vocab_size, "tokens")
        return JSONResponse({"prompt": text})

    return router


def watching(service: Service, http: HttpMetrics) -> APIRouter:
    """For operators."""
    router, worker = APIRouter(responses=errors(400)), service.worker
    responses = {200: gives("status"), **errors(503)}

    def health(is_well: bool) -> Response:
        if is_well:
            return JSONResponse({"status": "ok"})
        return error_response(NotReadyError(service.why_not_ready()))

    @router.head("/health", include_in_schema=False)
    @router.head("/health/ready", include_in_schema=False)
    @router.get("/health", responses=responses)
    @router.get("/health/ready", responses=responses)
    async def ready() -> Response:
        """Whether requests are taken."""
        return health(worker.is_ready)

    @router.get("/health/live", responses=responses)
    async def live() -> Response:
        """Whether the engine lives."""
        return health(worker.error is None)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        text = exposition(worker.engine, http, service.settings.model_name)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    return router


def page() -> APIRouter:
    """The page and its files."""
    router, files = APIRouter(include_in_schema=False), load_files()

    @router.head("/")
    @router.get("/")
    async def index(request: Request) -> Response:
        return await file(INDEX, request)

    @router.get("/page/{name}")
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return file_response(files[name], request)

    return router


def _has_chat(engine: Engine) -> bool:
    tokenizer = engine.tokenizer
    return isinstance(tokenizer, ChatTokenizer) and getattr(tokenizer, "has_chat", True)


def _encode(body: TokenizeBody, engine: Engine) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give a prompt or messages, and not both", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens is not None:
            raise RequestError(
                "a conversation brings its own special tokens; add_special_tokens goes with a prompt",
                param="add_special_tokens",
            )
        return engine.encode_chat(conversation(body.messages))
    assert body.prompt is not None, "checked above"
    if body.add_special_tokens is False and isinstance(engine.tokenizer, ChatTokenizer):
        return engine.tokenizer.encode(body.prompt, add_special=False)
    return engine.encode(body.prompt)


def _no_request(request_id: str) -> UnknownRequestError:
    return UnknownRequestError(
        f"there is no request {request_id!r:.80} of yours; those that are over are kept for a while only",
        param="id",
    )
