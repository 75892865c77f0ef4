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
    """The width a request asked for, or the default. Never more than the answer can still use."""

    DEFAULT = 4

    def __init__(self, target: ModelInfo, drafter: Drafter) -> None:
        self._max_rewind = target.max_rewind
        self._drafter = drafter

    def choose(self, job: Job) -> Width:
        asked = self.DEFAULT if job.width is None else job.width
        width = min(asked, job.limit - len(job.tokens) - 1)  # the round adds one token of the target's own
        if width <= 0:
            return Width(0)
        if self._drafter.lag(job) > 0:
            return Width(0, "the draft is still reading the prompt")
        if self._max_rewind is not None and width > self._max_rewind:
            if self._max_rewind > 0:
                return Width(self._max_rewind, f"the target can rewind only {self._max_rewind} tokens")
            if job.width is None:
                return Width(0, "the target cannot rewind, so drafting saves no pass")
            return Width(1, "the target cannot rewind: one draft a round, judged before it is fed")
        return Width(width)
