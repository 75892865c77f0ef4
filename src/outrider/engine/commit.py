"""What happens to the tokens of a verdict: emitted one by one until something stops the answer, inside a block too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.errors import BackendError
from outrider.types import FinishReason, Job, OnToken, TextOut


class Taken(NamedTuple):
    """What of a round's tokens went out: the text each of them added, and whether the answer ended there."""

    pieces: list[str]
    reason: FinishReason | None


def take(job: Job, tokens: Sequence[int]) -> Taken:
    """Append tokens to the job up to the first that ends the answer; nothing after it exists for anyone."""
    held, counts, grammar, stop_ids = job.tokens, job.counts, job.grammar, job.stop_ids
    stream, on_token, length = job.text, job.request.on_token, len(job.tokens)
    pieces: list[str] = []
    for token in tokens:
        held.append(token)
        length += 1
        if counts is not None:
            counts[token] = counts.get(token, 0) + 1
        stopped = token in stop_ids  # its id is part of the answer, its text is not
        is_full = length >= job.limit
        piece = ""
        if stream is not None and not stopped:
            piece = _push(stream, token, length >= job.min_length)
        is_over = stopped or (stream is not None and stream.stopped)
        if grammar is not None and not is_over:
            grammar.advance(token)
            is_over = grammar.is_complete  # nothing may follow
        if stream is not None and (is_over or is_full):
            piece += stream.finish()  # nothing can follow: what was held back is text
        pieces.append(piece)
        if on_token is not None:
            _call(job, on_token, token, piece)
        if is_over:
            return Taken(pieces, FinishReason.STOP)
        if job.cancelled and on_token is not None:
            return Taken(pieces, FinishReason.CANCELLED)
        if is_full:
            return Taken(pieces, FinishReason.LENGTH)
    return Taken(pieces, None)


def _push(stream: TextOut, token: int, may_stop: bool) -> str:
    try:
        return stream.push(token, may_stop=may_stop)
    except Exception as error:
        raise BackendError(f"the tokenizer failed on token {token}: {type(error).__name__}: {error}") from error


def _call(job: Job, on_token: OnToken, token: int, piece: str) -> None:
    """The caller's callback. What it raises ends the request and reaches the caller as it is."""
    try:
        answer = on_token(token, piece)
        if answer is not None and not answer:  # numpy's False is one, too
            job.cancelled = True
    except StopIteration as error:  # would look like the end of a stream
        raise RuntimeError("on_token raised StopIteration; return False to stop") from error
