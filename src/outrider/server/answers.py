"""Answers in OpenAI's shapes: whole bodies, and the chunks of a stream. One `Answers` serves one HTTP call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from outrider import __version__
from outrider.server.figures import usage
from outrider.server.spelling import Offsets, Spelling
from outrider.server.translate import Asked
from outrider.types import Event, FinishReason, Result, TokenLogprob

Json = dict[str, Any]
FINGERPRINT = f"outrider-{__version__}"
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity

WHOLE = {"chat": "chat.completion", "text": "text_completion"}
CHUNK = {"chat": "chat.completion.chunk", "text": "text_completion"}
# OpenAI's clients know two ends; what else there is says `stop_reason`.
FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.CANCELLED: "length",
}


class Answers:
    """The answers to one call, as they are made. `results` fills up as choices end."""

    def __init__(self, asked: Asked, spelling: Spelling) -> None:
        self.asked = asked
        self.results: dict[int, Result] = {}
        self._spelling = spelling
        self._created = int(time.time())
        self._offsets = [self._offsets_of(index) for index in range(len(asked.requests))]

    def whole(self, results: Sequence[Result]) -> Json:
        """The body of an answer that is not streamed."""
        self.results = dict(enumerate(results))
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        return {**self._head(WHOLE), "choices": choices, "usage": self.usage()}

    def opening(self) -> list[Json]:
        """Chunks that need no token: whose turn it is, or the echo."""
        asked = self.asked
        if asked.kind == "chat":
            deltas: list[Json] = [{"delta": {"role": "assistant", "content": ""}} for _ in asked.requests]
        elif asked.echo and not asked.waits_for_prompt:
            deltas = [{"text": asked.question(index).text} for index in range(len(asked.requests))]
        else:
            return []
        ends = {"logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": index, **delta, **ends}]) for index, delta in enumerate(deltas)]

    def chunk(self, index: int, event: Event) -> Json | None:
        """What a round adds to a choice; None where nothing can be shown yet."""
        asked, result = self.asked, event.result
        if result is not None:
            self.results[index] = result
        if asked.waits_for_prompt or asked.is_silent:
            return None if result is None else self._chunk([self._ending(index, result)])
        choice: Json = {"index": index}
        if asked.kind == "chat":
            choice["delta"] = {"content": event.text}
        else:
            choice["text"] = event.text
        choice["logprobs"] = self._logprobs(index, event.logprobs)
        choice |= _end(result)
        chunk = self._chunk([choice])
        if asked.trace:
            chunk["speculation"] = trace(event, self._spelling)
        return chunk

    def closing(self) -> list[Json]:
        """The chunk after the last choice, if it was asked for."""
        return [{**self._head(CHUNK), "choices": [], "usage": self.usage()}] if self.asked.include_usage else []

    def usage(self) -> Json:
        return usage(self.asked, [self.results[index] for index in sorted(self.results)])

    def _head(self, kinds: dict[str, str]) -> Json:
        return {
            "id": self.asked.id,
            "object": kinds[self.asked.kind],
            "created": self._created,
            "model": self.asked.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head(CHUNK), "choices": choices}
        if self.asked.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, result: Result) -> Json:
        """A whole choice."""
        choice: Json = {"index": index}
        asked = self.asked
        if asked.kind == "chat":
            choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
        else:
            echo = asked.question(index).text if asked.echo else ""
            choice["text"] = echo + ("" if asked.is_silent else result.text)
        choice["logprobs"] = self._logprobs(index, self._scored(index, result))
        return {**choice, **_end(result)}

    def _ending(self, index: int, result: Result) -> Json:
        """All of a choice as its last chunk; of a silent one whose echo was sent, just the end."""
        choice = self._choice(index, result)
        if not self.asked.waits_for_prompt:
            choice["text"] = ""
        return choice

    def _scored(self, index: int, result: Result) -> list[TokenLogprob] | None:
        """Logprobs of what is shown: the answer, and the prompt before it where it is echoed."""
        if self.asked.logprobs is None:
            return None
        shown = [] if self.asked.is_silent else list(result.logprobs or [])
        if not self.asked.echo:
            return shown
        first = TokenLogprob(self.asked.question(index).tokens[0], 0.0, [])  # nothing comes before it: shown as null
        return [first, *(one for one in result.prompt_logprobs or [] if one is not None), *shown]

    def _logprobs(self, index: int, scored: Sequence[TokenLogprob] | None) -> Json | None:
        if self.asked.logprobs is None or scored is None:
            return None
        if self.asked.kind == "chat":
            return {"content": [self._entry(one) for one in scored], "refusal": None}
        values: list[float | None] = [_finite(one.logprob) for one in scored]
        tops: list[Json | None] | None = [self._tops(one) for one in scored] if self.asked.logprobs else None
        if self.asked.echo and scored:
            values[0] = None
            if tops is not None:
                tops[0] = None
        return {
            "tokens": [self._spelling.name(one.token) for one in scored],
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": self._offsets[index].of(one.token for one in scored),
        }

    def _entry(self, one: TokenLogprob) -> Json:
        """A token as chat has it, with its alternatives."""
        return {
            **self._scored_token(one.token, one.logprob),
            "top_logprobs": [self._scored_token(token, logprob) for token, logprob in one.top],
        }

    def _scored_token(self, token: int, logprob: float) -> Json:
        data = self._spelling.data(token)
        return {
            "token": self._spelling.name(token),
            "logprob": _finite(logprob),
            "bytes": list(data) if data else None,
        }

    def _tops(self, one: TokenLogprob) -> Json:
        """Alternatives as plain completions have them: the chosen token is always among them."""
        tops: Json = {}
        for token, logprob in [*one.top, (one.token, one.logprob)]:
            tops.setdefault(self._spelling.name(token), _finite(logprob))
        return tops

    def _offsets_of(self, index: int) -> Offsets:
        """Where tokens begin in the text shown."""
        return Offsets(self._spelling, self.asked.question(index).start)


def _end(result: Result | None) -> Json:
    if result is None:
        return {"finish_reason": None}
    end = {"finish_reason": FINISH[result.finish_reason]}
    if end["finish_reason"] != result.finish_reason:
        end["stop_reason"] = str(result.finish_reason)
    return end


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def trace(event: Event, spelling: Spelling) -> Json:
    """Where the tokens of a round came from, and which of the request's own drafts did not stay."""
    kept, is_leaf = _path(event)
    last = "plain" if not event.drafts else "bonus" if is_leaf else "replaced"
    origins = ["kept" if place < event.accepted else last for place in range(len(event.tokens))]
    return {
        "tokens": [
            {"id": token, "text": piece, "origin": origin}
            for token, piece, origin in zip(event.tokens, event.pieces, origins, strict=True)
        ],
        "drafted": len(event.drafts),
        "accepted": min(event.accepted, len(event.tokens)),
        "refused": [spelling.name(draft) for place, draft in enumerate(event.drafts) if place not in kept],
    }


def _path(event: Event) -> tuple[set[int], bool]:
    """The drafts that stayed, and whether nothing was drafted after the last of them."""
    parents = event.parents if event.parents is not None else list(range(-1, len(event.drafts) - 1))
    kept: set[int] = set()
    node = -1
    for token in event.tokens[: event.accepted]:
        node = next(place for place, draft in enumerate(event.drafts) if parents[place] == node and draft == token)
        kept.add(node)
    return kept, node not in parents
