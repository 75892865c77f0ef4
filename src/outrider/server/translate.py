"""From a body to requests of the engine: one per choice, and what the answers must know of the question.

Settings that were not given stay unset, so that the model's own defaults hold.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from outrider.engine.engine import Engine
from outrider.errors import OutriderError, RequestError, UnknownMethodError
from outrider.server.constraints import constraining_field, constraint_of
from outrider.server.errors import UnknownModelError
from outrider.server.schema import MOST_CHOICES, ChatBody, CompletionBody, Generation, Message, Speculation
from outrider.server.settings import ServerSettings
from outrider.server.spelling import Spelling
from outrider.types import Request

Kind = Literal["chat", "text"]
MOST_COPIES = 1 << 20  # ids of one field in all answers to a call: each answer has them checked and copied
USUAL_LENGTH = 16  # of a plain completion nobody gave a length for, as OpenAI has it

# Fields that go to the engine as they are: by the same name, or by its own.
SAME = (
    "temperature top_p top_k min_p typical_p repetition_penalty presence_penalty frequency_penalty banned seed accept "
    "min_tokens stop ignore_eos priority"
)
SETTINGS = {**{name: name for name in SAME.split()}, "stop_token_ids": "stop_ids"}
# What the engine calls a field, and what the caller does.
CALLERS_NAMES = {
    "stop_ids": "stop_token_ids",
    "method": "speculation.draft",
    "width": "speculation.width",
    "tree": "speculation.tree",
    "deadline_s": "deadline_ms",
}


class Question(NamedTuple):
    """A prompt as the model reads it, and as it is echoed. `start` is where its tokens begin in that text: a tokenizer
    may put a space of its own before it, so it may be below 0."""

    tokens: list[int]
    text: str
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One HTTP call: `n` requests for each question, and how the answers are to be shown."""

    id: str
    kind: Kind
    model: str
    questions: list[Question]
    requests: list[Request]
    method: str
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    trace: bool = False
    logprobs: int | None = None  # alternatives of each token to show; None: no logprobs at all
    echo: bool = False
    is_silent: bool = False  # only the echo was asked for
    user: str | None = None

    @property
    def waits_for_prompt(self) -> bool:
        """Whether even a stream can show nothing before the end: the prompt's logprobs come with the result."""
        return self.echo and self.logprobs is not None

    def question(self, index: int) -> Question:
        """What the choice of this index answers."""
        return self.questions[index // self.n]


def read_request(
    body: ChatBody | CompletionBody, engine: Engine, settings: ServerSettings, *, name: str | None, tenant: str
) -> Asked:
    """Everything about a call. Encodes, so it runs on a thread; raises what is wrong in the caller's own names."""
    kind: Kind = "chat" if isinstance(body, ChatBody) else "text"
    call_id = name or f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
    try:
        return _asked(body, engine, settings, call_id, kind, tenant)
    except OutriderError as error:
        raise in_callers_words(error, body) from None


def in_callers_words(error: OutriderError, body: ChatBody | CompletionBody) -> OutriderError:
    """The same error about the field as the caller wrote it."""
    if error.param == "prompt" and isinstance(body, ChatBody):
        error.param = "messages"
    elif error.param == "constraint":
        error.param = constraining_field(body)
    else:
        error.param = CALLERS_NAMES.get(error.param or "", error.param)
    return error


def check_model(name: str | None, settings: ServerSettings) -> None:
    if name not in (None, "default", settings.model_name):
        raise UnknownModelError(
            f"The model `{name or '':.80}` does not exist or you do not have access to it; this server has "
            f"`{settings.model_name}`",
            param="model",
        )


def conversation(messages: Sequence[Message]) -> list[dict[str, str]]:
    """As chat templates know it: they have no developers."""
    roles = {"developer": "system"}
    return [{"role": roles.get(one.role, one.role), "content": one.content} for one in messages]


def _asked(
    body: ChatBody | CompletionBody, engine: Engine, settings: ServerSettings, call_id: str, kind: Kind, tenant: str
) -> Asked:
    check_model(body.model, settings)
    speculation, is_silent, logprobs = body.speculation or Speculation(), _is_silent(body), _logprobs(body)
    _check_stream(body, speculation)
    if speculation.trace and logprobs is not None and _echoes(body):
        raise RequestError(
            "speculation.trace does not go with echo and logprobs, which come at once at the end; leave one out",
            param="speculation.trace",
        )
    flat = {
        **{theirs: getattr(body, ours) for ours, theirs in SETTINGS.items()},
        **_speculation(speculation, engine),
        "logit_bias": None if body.logit_bias is None else {int(key): bias for key, bias in body.logit_bias.items()},
        "constraint": constraint_of(body),
        "deadline_s": None if body.deadline_ms is None else body.deadline_ms / 1000.0,
        "tenant": tenant,
        "logprobs": logprobs,
        "prompt_logprobs": True if logprobs is not None and _echoes(body) else None,
    }
    length = 1 if is_silent else _length(body, settings)
    questions, n = _questions(body, engine), body.n or 1
    if len(questions) * n > MOST_CHOICES:
        raise RequestError(f"{len(questions)} prompts times n={n} is more than {MOST_CHOICES} answers", param="n")
    _check_copies(body, len(questions) * n)
    rooms = [engine.context - len(question.tokens) for question in questions]
    lengths = [length if length is not None else _usual_length(kind, settings, room) for room in rooms]
    return Asked(
        id=call_id,
        kind=kind,
        model=settings.model_name,
        questions=questions,
        requests=_requests(call_id, questions, lengths, n, flat, engine.defaults),
        method="none" if speculation.off or speculation.width == 0 else speculation.draft or engine.method,
        n=n,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        trace=bool(speculation.trace),
        logprobs=logprobs,
        echo=_echoes(body),
        is_silent=is_silent,
        user=body.user,
    )


def _check_copies(body: Generation, num_answers: int) -> None:
    """Long lists of ids and many answers do not go together."""
    for name in ("banned", "stop_token_ids"):
        count = len(getattr(body, name) or ())
        if count * num_answers > MOST_COPIES:
            raise RequestError(
                f"{name} has {count} ids for each of {num_answers} answers, and at most {MOST_COPIES} are taken in "
                "all; ask for fewer answers, or shorten it",
                param=name,
            )


def _check_stream(body: Generation, speculation: Speculation) -> None:
    """Some settings are for streams only."""
    for name, is_given in (
        ("stream_options", body.stream_options is not None),
        ("speculation.trace", speculation.trace),
    ):
        if is_given and not body.stream:
            raise RequestError(f"{name} is for streams; set stream to true, or leave it out", param=name)


def _requests(
    call_id: str,
    questions: Sequence[Question],
    lengths: Sequence[int | None],
    n: int,
    flat: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> list[Request]:
    """Choices of one question differ by their index alone; they share their sampling settings as one object.

    The engine has one set of names for all clients. So it gets names of the server's own, which no two calls share.
    """
    first = Request.of(questions[0].tokens, {**flat, "max_tokens": lengths[0]}, defaults)
    unique = secrets.token_hex(8)
    requests: list[Request] = []
    for question, length in zip(questions, lengths, strict=True):
        for choice in range(n):
            name = f"{call_id}#{unique}.{len(requests)}"
            requests.append(replace(first, prompt=question.tokens, max_tokens=length, choice=choice, request_id=name))
    return requests


def _questions(body: ChatBody | CompletionBody, engine: Engine) -> list[Question]:
    if isinstance(body, ChatBody):
        return [Question(engine.encode_chat(conversation(body.messages)), "")]
    spelling = Spelling(engine.tokenizer)
    questions = [
        Question(engine.encode(prompt), prompt)
        if isinstance(prompt, str)
        else Question(prompt, spelling.text(prompt, engine.info.vocab_size, "prompt") if body.echo else "")
        for prompt in body.prompt
    ]
    if not body.echo or body.logprobs is None:
        return questions
    return [one._replace(start=len(one.text) - spelling.length(one.tokens)) for one in questions]


def _echoes(body: ChatBody | CompletionBody) -> bool:
    return isinstance(body, CompletionBody) and bool(body.echo)


def _is_silent(body: ChatBody | CompletionBody) -> bool:
    """Whether no answer is wanted: the engine writes one token all the same, and it is dropped."""
    if 0 not in (body.max_tokens, getattr(body, "max_completion_tokens", None)):
        return False
    if not _echoes(body):
        raise RequestError("max_tokens must be at least 1, got 0 (0 goes with echo only)", param="max_tokens")
    if body.min_tokens:
        raise RequestError(f"min_tokens={body.min_tokens} is more than max_tokens=0; lower it", param="min_tokens")
    return True


def _length(body: ChatBody | CompletionBody, settings: ServerSettings) -> int | None:
    """What was asked for, within what the server allows."""
    given = {"max_tokens": body.max_tokens, "max_completion_tokens": getattr(body, "max_completion_tokens", None)}
    asked = {name: value for name, value in given.items() if value is not None}
    if len(set(asked.values())) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens say different lengths; give one of them",
            param="max_completion_tokens",
        )
    for name, value in asked.items():
        if settings.max_output is not None and value > settings.max_output:
            raise RequestError(f"{name} must be at most {settings.max_output} here, got {value}", param=name)
        return value
    return None


def _usual_length(kind: Kind, settings: ServerSettings, room: int) -> int | None:
    """Of an answer nobody gave a length for; None is up to the end of the context."""
    lengths = [USUAL_LENGTH if kind == "text" else None, settings.max_output]
    known = [length for length in lengths if length is not None]
    return min(*known, room) if known and room > 0 else None


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs set to true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _speculation(given: Speculation, engine: Engine) -> dict[str, Any]:
    """Only what was loaded can be named: a path means nothing here."""
    if given.off and given.width:
        raise RequestError("speculation.off and a width contradict each other; give one", param="speculation.width")
    names = [] if given.draft is None else [name.strip() for name in given.draft.split(",")]
    for name in names:
        if name not in engine.methods:
            raise UnknownMethodError(
                f"{name!r:.80} was not loaded; speculation.draft takes {' or '.join(engine.methods)}",
                param="speculation.draft",
            )
    return {
        "method": ",".join(names) or None,
        "width": 0 if given.off else given.width,
        "tree": given.tree,
    }
