"""The OpenAPI description: what each path takes and may answer."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from outrider import __version__
from outrider.server.schema import ChatBody, CompletionBody, DetokenizeBody, Strict, TokenizeBody

Json = dict[str, Any]
BODIES: tuple[type[Strict], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_REF = "#/components/schemas/{model}"

_SAID = {
    400: "What was sent cannot be used; the message says what to change.",
    401: "The API key is missing or not known.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too many requests run or wait; come back after Retry-After seconds.",
    500: "The model or the server failed.",
    503: "No requests are taken now; come back after Retry-After seconds.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def errors(*statuses: int) -> dict[int | str, Json]:
    """Error responses of a path, for FastAPI's `responses`."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {status: {"description": _SAID[status], "content": content} for status in statuses}


ASKING = errors(400, 401, 404, 408, 413, 429, 500, 503)
LOOKING = errors(400, 401, 500)


def takes(body: type[Strict]) -> Json:
    """The request body of a path, for FastAPI's `openapi_extra`. We read it ourselves, so that nothing is converted."""
    schema = {"$ref": _REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def gives(*names: str) -> Json:
    """A JSON object that has at least these."""
    return {
        "description": "The answer.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": list(names),
                    "properties": {name: {} for name in names},
                }
            }
        },
    }


def answers() -> Json:
    """A completion, whole or as a stream."""
    whole = gives("id", "object", "created", "model", "choices", "usage")
    whole["content"]["text/event-stream"] = {}
    return whole


def describe(app: FastAPI) -> Json:
    """FastAPI's description, with the bodies and errors that we handle ourselves."""
    told = get_openapi(title="Outrider", version=__version__, routes=app.routes)
    schemas = told.setdefault("components", {}).setdefault("schemas", {})
    _, definitions = models_json_schema([(body, "validation") for body in BODIES], ref_template=_REF)
    schemas.clear()
    schemas.update(definitions["$defs"], Error=_ERROR)
    told["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for operations in told["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if "401" in operation["responses"]:
                operation["security"] = [{"key": []}, {}]
    return told
