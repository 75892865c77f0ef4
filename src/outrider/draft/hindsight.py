"""Hindsight: what a drafter would have drafted for tokens that were emitted without it.

A drafter that rests has tokens to read before it can draft again. The pass that reads them gives a row for each, and
says for each whether the draft of one token would have been kept: many tokens are judged by one pass, none is verified.

That holds where a draft is kept if it is the target's own token: for greedy requests, and under `coupled`.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.sampling.ops import SamplingOps
from outrider.types import Array, Job

LONGEST = 8  # tokens of a chain
MOST_JUDGED = 64  # tokens of a job: rows take memory


def num_judged(job: Job, unread: int) -> int:
    """How many of a job's last tokens are judged, where so many are read for it."""
    return 0 if job.grammar is not None else min(unread, len(job.tokens) - job.num_prompt, MOST_JUDGED)


def judge(
    ops: SamplingOps, jobs: Sequence[Job], counts: Sequence[int], rows: Array, *, longest: int = LONGEST
) -> list[list[tuple[int, int]]]:
    """For each job the chains (right, drafted), one for each of its last `counts[b]` tokens.

    rows: the draft's logits; the row of a token is the one after the tokens before it. [N, V]
    """
    prefixes: list[Job] = []
    for job, count in zip(jobs, counts, strict=True):
        prefixes += [job.with_tokens(job.tokens[:length]) for length in range(len(job.tokens) - count, len(job.tokens))]
    drawn = ops.draft(prefixes, [[]] * len(prefixes), rows).tokens.tolist() if prefixes else []
    chains, start = list[list[tuple[int, int]]](), 0
    for job, count in zip(jobs, counts, strict=True):
        pairs = zip(drawn[start : start + count], job.tokens[len(job.tokens) - count :], strict=True)
        chains.append(_chains([token == emitted for token, emitted in pairs], longest))
        start += count
    return chains


def _chains(right: Sequence[bool], longest: int) -> list[tuple[int, int]]:
    """From each token on: a chain goes on until its first wrong token."""
    chains = list[tuple[int, int]]()
    ahead = 0  # right tokens from here on
    for back, is_right in enumerate(reversed(right), 1):
        ahead = ahead + 1 if is_right else 0
        chains.append((min(ahead, longest), min(ahead + 1, longest, back)))
    return chains[::-1]
