"""Errors as OpenAI's clients read them: a status, and one body for all."""

from __future__ import annotations

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from outrider.errors import OutriderError, RequestError

TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}
CODES = {404: "not_found", 405: "method_not_allowed"}
LONGEST_WAIT_S = 30  # what a client that should come back later is told at most


class BodyError(RequestError):
    """The body is no JSON object."""

    code = "invalid_body"


class UnknownHostError(RequestError):
    """The server is not known by the name it was called."""

    code = "unknown_host"


class KeyRefusedError(OutriderError):
    """No key, or one that is not known."""

    status, code = 401, "invalid_api_key"


class UnknownModelError(OutriderError):
    """The request names a model that is not served here."""

    status, code = 404, "model_not_found"


class UnknownRequestError(OutriderError):
    """There is no such request, or it is not this caller's."""

    status, code = 404, "request_not_found"


class SlowBodyError(OutriderError):
    """The body did not come in time."""

    status, code = 408, "body_timeout"


class BodyTooLargeError(OutriderError):
    """The body is longer than this server takes."""

    status, code = 413, "body_too_large"


class UnexpectedError(OutriderError):
    """What nobody foresaw. The reason is in the log, and only there."""

    def __init__(self, message: str = "the server failed on this request; its log says why") -> None:
        super().__init__(message)


def error_body(error: OutriderError) -> dict[str, Any]:
    kind = TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: OutriderError, *, wait_s: float | None = None) -> JSONResponse:
    """The answer to a request that failed; `wait_s` says when another try makes sense."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(min(max(math.ceil(wait_s or 1.0), 1), LONGEST_WAIT_S))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse(error_body(error), error.status, headers)


def routing_response(error: HTTPException, path: str) -> JSONResponse:
    """What the router refuses: paths and methods it does not know."""
    said = {404: f"there is nothing at {path!r:.200}", 405: f"{path!r:.200} does not answer this method"}
    problem = OutriderError(said.get(error.status_code, str(error.detail)))
    problem.status, problem.code = error.status_code, CODES.get(error.status_code, "refused")
    return JSONResponse(error_body(problem), error.status_code)
