"""Chat templates: a model file's own Jinja program that writes a conversation the way the model was trained on.

Set up as transformers does, so the same template gives the same text. The program comes from a file somebody
downloaded: it runs in Jinja's sandbox, out of which it cannot reach, and what it counts, writes and makes of texts and
numbers is limited (`growth.py`). That bounds the common ways to fill memory, not time: a template can still take long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import ModelFileError, RequestError
from outrider.tokenizer.growth import MAX_CHARACTERS, check, check_call, check_operator

MAX_REPEATS = 100_000  # numbers all range() of one rendering may yield together


class ChatTemplate:
    """One compiled template. `names` are the variables it may use besides the messages, such as bos_token."""

    def __init__(self, source: str, *, names: Mapping[str, str], path: Path) -> None:
        self._names = dict(names)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, ValueError, RecursionError, MemoryError) as error:
            reason = f"its chat template does not parse ({error}); use a file with a working one, or plain prompts"
            raise ModelFileError(f"{path}: {reason}") from error

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt of this conversation."""
        variables = {
            **self._names,  # first: a file must not put anything in the place of the messages
            "messages": _checked(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "range": _Ranges().take,
        }
        try:
            return self._write(variables)
        except RequestError:
            raise
        except Exception as error:  # whatever the template's program may raise
            reason = str(error) or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from error

    def _write(self, variables: Mapping[str, Any]) -> str:
        parts, size = [], 0
        for part in self._template.generate(variables):
            size += len(part)
            if size > MAX_CHARACTERS:
                raise RequestError(
                    f"the model's chat template writes more than {MAX_CHARACTERS} characters; send shorter messages",
                    param="messages",
                )
            parts.append(part)
        return "".join(parts)


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}", param="messages")
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must have role and content, got {message!r:.60}", param=where)
        for key in ("role", "content"):
            if key not in message:
                raise RequestError(f"{where} has no {key}; every message needs role and content", param=where)
            if not isinstance(message[key], str):
                raise RequestError(f"{where}.{key} must be text, got {message[key]!r:.60}", param=f"{where}.{key}")
    return [dict(message) for message in messages]


class _Ranges:
    """range() for one rendering: nested loops draw on one allowance."""

    def __init__(self) -> None:
        self._left = MAX_REPEATS

    def take(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._left -= len(numbers)
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(f"it counts further than {MAX_REPEATS}")
        return numbers


class _Code(CodeGenerator):
    """Jinja's compiler, but for `a ~ b`: the sandbox gets to see it."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses to make texts, lists and numbers beyond all measure."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Code

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 as Jinja has it
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            check_call(method.__name__, owner, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def join(self, parts: Sequence[Any]) -> str:
        texts = [str(part) for part in parts]
        check(sum(map(len, texts)))
        return "".join(texts)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is asked for its size first."""

    @wraps(function)
    def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
        check_call(name, value, args, kwargs)
        return function(value, *args, **kwargs)

    return limited


class _Generation(Extension):
    """{% generation %} marks what an assistant said, for training; here its body is just written."""

    tags = frozenset(("generation",))  # type: ignore[assignment]  # Jinja only reads it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Names(jinja2.utils.Namespace):
    """namespace() whose attributes cannot pass for Python's own."""

    def __init__(self, *values: Any, **attributes: Any) -> None:
        for name in dict(*values, **attributes):
            _check_name(name)
        super().__init__(*values, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not have the attribute {name!r}")


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    for name in ("center", "indent", "format", "batch", "tojson"):
        environment.filters[name] = _limited(name, environment.filters[name])
    del environment.globals["lipsum"]  # writes as much as it is asked to
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Names, dict=_new_dict
    )
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_dict(*values: Any, **items: Any) -> dict[Any, Any]:
    return dict(*values, **items)
