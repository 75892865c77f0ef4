"""From the bytes of a body to its model, or one sentence that says what is wrong with it and where."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from outrider.errors import RequestError
from outrider.server.errors import BodyError
from outrider.server.schema import FAULT, REFUSED, UNKNOWN, Strict

Body = TypeVar("Body", bound=Strict)

LONGEST_PATH = 120  # letters of a field's place that are told
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # how half a character can get into JSON
_LONGEST_NUMBER = 20  # digits and sign of 64 bits

# Words that follow a field's name, by pydantic's kind of error.
_SAID = {
    "missing": "is required",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
}
_WITHOUT_VALUE = ("missing", "too_short", "too_long", "string_too_short", "string_too_long", FAULT)


def parse(model: type[Body], raw: bytes) -> Body:
    """The body, or a RequestError."""
    try:
        return model.model_validate(_read(raw))
    except ValidationError as error:
        raise _explained(error.errors(include_url=False)[0]) from None
    except RecursionError:
        raise BodyError("the body is nested too deeply; a request needs a few levels") from None


def _read(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not UTF-8 (byte {error.start}); send JSON in UTF-8") from None
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_number, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        said = f"{error.msg[:1].lower()}{error.msg[1:]} (line {error.lineno}, column {error.colno})"
        raise BodyError(f"the body is not valid JSON: {said}") from None
    if not isinstance(value, dict):
        raise BodyError(f"the body must be a JSON object, got {_shown(value)}")
    if _HALF_PAIR.search(text):
        _check_text(value, ())
    return value


def _whole(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise BodyError(f"the number {digits[:10]}... has {len(digits)} digits; whole numbers take at most 64 bits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise BodyError(f"the number {digits[:20]} is too large; numbers take at most 64 bits")
    return value


def _no_number(name: str) -> NoReturn:
    raise BodyError(f"{name} is not JSON; numbers must be finite")


def _check_text(value: object, path: tuple[int | str, ...]) -> None:
    """No text holds half of a surrogate pair: it has no UTF-8, so no model can read it and no answer can hold it."""
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            where = _path([part for part in path if not _is_broken(part)]) or None
            raise RequestError(f"{where or 'a name'} holds half a surrogate pair; send valid Unicode", param=where)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_text(key, path)
            _check_text(inner, (*path, key))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            _check_text(inner, (*path, at))


def _is_broken(part: int | str) -> bool:
    return isinstance(part, str) and any("\ud800" <= letter <= "\udfff" for letter in part)


def _explained(error: ErrorDetails) -> RequestError:
    """pydantic's first complaint as a sentence of ours."""
    kind, context, path = error["type"], error.get("ctx", {}), list(error["loc"])
    if kind in (UNKNOWN, REFUSED):
        path.append(context["name"])
    param = _path(path)
    if kind == REFUSED:
        return RequestError(f"{param} is not supported: {context['reason']}", param=param)
    if kind == UNKNOWN:
        cure = f"did you mean {context['near']}?" if context["near"] else "leave it out"
        return RequestError(f"{param} is not a known field; {cure}", param=param)
    words = context["said"] if kind == FAULT else _SAID.get(kind, error["msg"].lower()).format(**context)
    got = "" if kind in _WITHOUT_VALUE else f", got {_shown(error['input'])}"
    return RequestError(f"{param or 'the body'} {words}{got}", param=param or None)


def _path(parts: Sequence[int | str]) -> str:
    """`messages[0].content`, as people write it; names that somebody made up are cut."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part[:60] if part.isprintable() else ascii(part[:60])
            path += f".{name}" if path else name
        if len(path) > LONGEST_PATH:
            return f"{path[:LONGEST_PATH]}..."
    return path


def _shown(value: object) -> str:
    return _short.repr(value)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 3
_short.maxlevel = 2
