"""What an answer must look like: response_format, grammar or regex, of which a body has at most one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outrider.errors import RequestError
from outrider.server.schema import LONGEST_RULES, Generation
from outrider.types import Constraint


def constraint_of(body: Generation) -> Constraint | None:
    given = {name: make(body) for name, make in FIELDS.items()}
    names = [name for name, constraint in given.items() if constraint is not None]
    if len(names) > 1:
        raise RequestError(f"{' and '.join(names)} each say what the answer looks like; give one", param=names[1])
    return given[names[0]] if names else None


def constraining_field(body: Generation) -> str | None:
    """Which field of the body says it."""
    return next((name for name, make in FIELDS.items() if make(body) is not None), None)


def _format(body: Generation) -> Constraint | None:
    form = body.response_format
    if form is None:
        return None
    if (form.type == "json_schema") != (form.json_schema is not None):
        raise RequestError(
            "response_format.json_schema goes with the type json_schema, and that with it",
            param="response_format.json_schema",
        )
    if form.json_schema is not None:
        constraint = Constraint.json_schema(form.json_schema.schema_)
        if len(constraint.text) > LONGEST_RULES:
            raise RequestError(
                f"the schema has {len(constraint.text)} characters, and at most {LONGEST_RULES} are taken; shorten it",
                param="response_format",
            )
        return constraint
    return Constraint.json() if form.type == "json_object" else None


FIELDS: Mapping[str, Callable[[Generation], Constraint | None]] = {
    "response_format": _format,
    "grammar": lambda body: None if body.grammar is None else Constraint.grammar(body.grammar),
    "regex": lambda body: None if body.regex is None else Constraint.regex(body.regex),
}
