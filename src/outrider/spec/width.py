"""How many tokens to draft for a job this round: what was asked for, as far as target, draft and answer allow."""

from __future__ import annotations

from typing import NamedTuple

from outrider.backends.base import ModelInfo
from outrider.draft.base import Drafter
from outrider.types import Job


class Width(NamedTuple):
    """A width, and why it is less than what was asked for (None when it is not, or only because the answer ends)."""

    width: int
    fallback: str | None = None


class FixedWidth:
    """The width a request asked for. Never more than the answer can still use."""

    def __init__(self, target: ModelInfo, drafter: Drafter, chunk: int) -> None:
        self._max_rewind = target.max_rewind
        self._drafter = drafter
        self._chunk = chunk

    def choose(self, job: Job) -> Width:
        width = min(job.width, job.limit - len(job.tokens) - 1)  # the round adds one token of the target's own
        if width <= 0:
            return Width(0)
        if self._drafter.lag(job) > self._chunk:
            return Width(0, "the draft is still reading the prompt")
        if self._max_rewind is not None and width > self._max_rewind:
            if self._max_rewind == 0:  # one draft, judged before it is fed: exact, but it saves no pass
                return Width(1, "the target cannot rewind: one token a round")
            return Width(self._max_rewind, f"the target can rewind only {self._max_rewind} tokens")
        return Width(width)
