"""The request bodies: every field that is honoured, with its type and range. Null is the same as leaving a field out.

Nothing is converted on the way: "5", 5.0 and true are no whole numbers. What is not given stays None, so that the
model's own settings hold; OpenAI's default temperature of 1 does not override them.

Collections have a limit, which is checked before their entries are. A list is given up at its first bad entry: pydantic
would otherwise describe them all, which takes seconds and lets nothing else run.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from outrider.server import refusals
from outrider.server.refusals import Refusals

MOST_CHOICES = 128  # answers to one call: prompts times n
MOST_STOPS, LONGEST_STOP = 16, 1000
MOST_BIASES = 1024
MOST_IDS = 1 << 18  # of a vocabulary: none has more tokens
MOST_MESSAGES, MOST_PARTS = 1 << 14, 1 << 10
MOST_SENT = 1 << 20  # ids whose text is wanted
LONGEST_RULES = 1 << 15  # characters of a schema, a regex or a grammar: compiling takes longer than they are long
WIDEST = 64  # drafted tokens a round that a caller may ask for
MOST_TOKENS = (1 << 31) - 1
UNKNOWN, REFUSED, FAULT = "unknown_field", "refused_field", "fault"  # errors of our own; `parse` puts them into words

TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Length = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-1e6, le=1e6)]


def fault(said: str) -> PydanticCustomError:
    """What is wrong with a field, as words that follow its name."""
    return PydanticCustomError(FAULT, "{said}", {"said": said})


def at_most(most: int, cure: str) -> BeforeValidator:
    """Refuses a list or an object by its size, before its entries are looked at."""

    def check(given: object) -> object:
        if isinstance(given, (list, dict)) and len(given) > most:
            raise fault(f"has {len(given)} entries, and at most {most} are taken; {cure}")
        return given

    return BeforeValidator(check)


class Strict(BaseModel):
    """A body, or a part of one. A name it does not know is an error that says why, or which name was meant."""

    refusals: ClassVar[Refusals] = {}
    rules: ClassVar[dict[str, Any]] = {}  # what the description says of fields together
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=lambda schema, model: _describe(schema, model),
    )

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Refuse unknown names, and leave out known ones that ask for nothing."""
        if not isinstance(given, dict):
            return given
        own = {field.alias or name for name, field in cls.model_fields.items()}
        for name in given:
            if name in own:
                continue
            refusal = cls.refusals.get(name)
            if refusal is None:
                near = get_close_matches(name[:60], own, n=1)
                raise PydanticCustomError(UNKNOWN, "unknown", {"name": name, "near": near[0] if near else None})
            if not refusal.tolerates(given[name]):
                raise PydanticCustomError(REFUSED, "refused", {"name": name, "reason": refusal.reason})
        return {name: value for name, value in given.items() if name in own}


def _describe(schema: dict[str, Any], model: type[Any]) -> None:
    """The description is truthful about what is let through."""
    schema.setdefault("properties", {}).update({name: one.schema() for name, one in model.refusals.items()})
    schema.update(model.rules)


def _joined(content: object) -> object:
    """Text, or text parts as one text with a line each."""
    if not isinstance(content, list):
        return content
    if not content:
        raise fault("must have at least one part")
    texts = []
    for at, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise fault(f"takes parts such as {{'type': 'text', 'text': ...}}; part {at} is none")
        if part["type"] != "text":
            raise fault(f"takes text parts only; part {at} is {part['type'][:40]!r}, which this server cannot read")
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
            raise fault(f"takes parts with type and text, nothing else; see part {at}")
        texts.append(part["text"])
    return "\n".join(texts)


def _listed(stop: object) -> object:
    """A stop text, or several."""
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list):
        raise fault("takes a text or a list of texts")
    if len(texts) > MOST_STOPS:
        raise fault(f"has {len(texts)} entries, and takes up to {MOST_STOPS}; leave some out")
    if not all(isinstance(text, str) for text in texts):
        raise fault("takes a text or a list of texts")
    if not all(1 <= len(text) <= LONGEST_STOP for text in texts):
        raise fault(f"takes up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters")
    return texts


def _one_or_more_prompts(prompt: object) -> object:
    """A list of prompts, each a text or a list of ids. A flat list of numbers is one prompt."""
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
    if len(prompts) > MOST_CHOICES:
        raise fault(f"takes up to {MOST_CHOICES} prompts")
    for one in prompts:
        is_ids = isinstance(one, list) and all(type(token) is int and 0 <= token <= MOST_TOKENS for token in one)
        if not isinstance(one, str) and not is_ids:
            raise fault("takes a text, a list of texts, a list of token ids, or a list of those lists")
        if not one:
            raise fault("is empty; give at least one token")
        if type(one) is not type(prompts[0]):
            raise fault("takes texts or lists of token ids, not a mixture")
    return prompts


def _ids_as_text(bias: object) -> object:
    if isinstance(bias, dict) and not all(len(key) < 10 and key.isascii() and key.isdecimal() for key in bias):
        raise fault('takes token ids as keys, such as {"42": -100}')
    return bias


def _schema(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema(schema)


TokenIds = Annotated[
    list[TokenId], Field(max_length=MOST_IDS, fail_fast=True), at_most(MOST_IDS, "no vocabulary has more tokens")
]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}}
_NULL = {"type": "null"}
_STOP = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}

Content = Annotated[
    str,
    BeforeValidator(_joined),
    at_most(MOST_PARTS, "join the texts"),
    _schema(anyOf=[{"type": "string"}, {"type": "array", "minItems": 1, "maxItems": MOST_PARTS, "items": _PART}]),
]
Stop = Annotated[
    list[str],
    BeforeValidator(_listed),
    _schema(anyOf=[_STOP, {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}]),
]
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_one_or_more_prompts),
    _schema(
        anyOf=[
            _TEXT,
            _IDS,
            {"type": "array", "minItems": 1, "maxItems": MOST_CHOICES, "items": _TEXT},
            {"type": "array", "minItems": 1, "maxItems": MOST_CHOICES, "items": _IDS},
        ]
    ),
]
Bias = Annotated[
    dict[str, Penalty],
    BeforeValidator(_ids_as_text),
    at_most(MOST_BIASES, "to forbid more tokens, use banned"),
    _schema(
        type="object",
        maxProperties=MOST_BIASES,
        propertyNames={"pattern": "^[0-9]{1,9}$"},
        additionalProperties={"type": "number", "minimum": -1e6, "maximum": 1e6},
    ),
]
NumLogprobs = Annotated[
    Annotated[int, Field(ge=0, le=20)] | None,
    BeforeValidator(lambda given: None if given is False else given),
    _schema(anyOf=[{"type": "integer", "minimum": 0, "maximum": 20}, {"const": False}, {"type": "null"}]),
]


class Message(Strict):
    """A turn of the conversation. `developer` is read as `system`."""

    refusals = refusals.MESSAGE
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    at_most(MOST_MESSAGES, "send the latest ones"),
]


class StreamOptions(Strict):
    refusals = refusals.STREAM_OPTIONS
    include_usage: bool | None = None


class JsonSchema(Strict):
    """The schema is always kept to, `strict` or not."""

    name: str | None = Field(default=None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Speculation(Strict):
    """How this request is drafted for: by a method that was loaded, how wide, as a tree, or not at all."""

    draft: str | None = Field(default=None, max_length=200, description="a loaded method, or several with commas")
    width: int | None = Field(default=None, ge=0, le=WIDEST, description="tokens drafted a round at most")
    tree: bool | None = None
    off: bool | None = Field(default=None, description="plain decoding")
    trace: bool | None = Field(default=None, description="where every token came from, in the chunks of a stream")


class Generation(Strict):
    """What both kinds of completions take."""

    model: str | None = Field(default=None, max_length=500, description="the served model, 'default', or nothing")
    max_tokens: Length | None = None
    min_tokens: Length | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(default=None, ge=-(1 << 63), le=(1 << 64) - 1)
    temperature: float | None = Field(default=None, ge=0, le=1e6, description="left out, the model's own default holds")
    top_p: Share | None = None
    top_k: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: Share | None = None
    repetition_penalty: float | None = Field(default=None, ge=1e-6, le=1e6)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    banned: TokenIds | None = Field(default=None, description="ids that are never drawn")
    accept: Literal["auto", "rejection", "coupled"] | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = Field(default=None, min_length=1, max_length=LONGEST_RULES, description="in Lark's syntax")
    regex: str | None = Field(default=None, min_length=1, max_length=LONGEST_RULES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=500)
    priority: Literal["low", "normal", "high"] | None = None
    deadline_ms: float | None = Field(default=None, ge=0, le=1e12)
    speculation: Speculation | None = None


class ChatBody(Generation):
    """POST /v1/chat/completions"""

    refusals = refusals.CHAT
    messages: Messages
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class CompletionBody(Generation):
    """POST /v1/completions"""

    refusals = refusals.COMPLETION
    prompt: Prompts
    logprobs: NumLogprobs = None
    echo: bool | None = None


class TokenizeBody(Strict):
    """POST /tokenize: a prompt, or a conversation as the model reads it."""

    rules = {
        "oneOf": [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": _NULL}},
            {
                "required": ["messages"],
                "properties": {"messages": {"type": "array"}, "prompt": _NULL, "add_special_tokens": _NULL},
            },
        ]
    }
    model: str | None = Field(default=None, max_length=500)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(default=None, description="of a prompt; usually true")


class DetokenizeBody(Strict):
    """POST /detokenize"""

    model: str | None = Field(default=None, max_length=500)
    tokens: Annotated[
        list[TokenId], Field(max_length=MOST_SENT, fail_fast=True), at_most(MOST_SENT, "send them in parts")
    ]
