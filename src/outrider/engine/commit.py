"""What happens to the tokens of a verdict: emitted one by one until something stops the answer, inside a block too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.types import FinishReason, Job


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
        piece = ""
        if stream is not None and not stopped:
            piece = stream.push(token)
            text += piece
            stopped = stream.stopped
        if on_token is not None and on_token(token, piece) is False:
            job.cancelled = True
        if stopped:
            return Taken(num_taken, text, FinishReason.STOP)
        if job.cancelled and on_token is not None:
            return Taken(num_taken, text, FinishReason.CANCELLED)
        if len(held) >= job.limit:
            return Taken(num_taken, text, FinishReason.LENGTH)
    return Taken(len(tokens), text, None)
