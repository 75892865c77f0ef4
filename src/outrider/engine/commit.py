"""What happens to the tokens of a verdict: emitted one by one until something stops the answer, inside a block too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.errors import BackendError
from outrider.types import FinishReason, Job, OnToken, TextOut


class Taken(NamedTuple):
    """What of a round's tokens went out: how many, their text, and whether the answer ended there."""

    num_tokens: int
    text: str
    reason: FinishReason | None


def take(job: Job, tokens: Sequence[int]) -> Taken:
    """Append tokens to the job up to the first that ends the answer; nothing after it exists for anyone."""
    held, stop_ids, stream, on_token = job.tokens, job.stop_ids, job.text, job.request.on_token
    text = ""
    for num_taken, token in enumerate(tokens, 1):
        held.append(token)
        if job.counts is not None:
            job.counts[token] = job.counts.get(token, 0) + 1
        stopped = token in stop_ids  # its id is part of the answer, its text is not
        is_full = len(held) >= job.limit
        piece = ""
        if stream is not None:
            if not stopped:
                piece = _push(stream, token)
                stopped = stream.stopped
            if stopped or is_full:
                piece += stream.finish()  # nothing can follow: what was held back is text
            text += piece
        if on_token is not None:
            _call(job, on_token, token, piece)
        if stopped:
            return Taken(num_taken, text, FinishReason.STOP)
        if job.cancelled and on_token is not None:
            return Taken(num_taken, text, FinishReason.CANCELLED)
        if is_full:
            return Taken(num_taken, text, FinishReason.LENGTH)
    return Taken(len(tokens), text, None)


def _push(stream: TextOut, token: int) -> str:
    try:
        return stream.push(token)
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
