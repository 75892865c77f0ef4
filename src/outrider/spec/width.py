"""How many tokens to draft for each job this round: what was asked for or what pays, as far as target, draft and answer
allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from outrider.backends.base import ModelInfo
from outrider.errors import DraftError
from outrider.metrics import Outcome, PassTimes
from outrider.spec.router import Router
from outrider.types import Ask, Drafts, Job, Plan

READING = "the draft is still reading the prompt"


class Choice(NamedTuple):
    """Who is asked for how much, and why it is less than what was asked for (None when it is not, or only because the
    answer ends)."""

    asks: tuple[Ask, ...] = ()
    fallback: str | None = None
    error: DraftError | None = None  # the drafter failed to say how far it is


PLAIN = Choice()


class Controller(Protocol):
    """Decides for the jobs that leave width or shape to the engine, from what it has seen."""

    def choose(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> Sequence[tuple[Ask, ...]]:
        """For each deciding job, how much of its room to use: asks with widths up to those given, 0 included.

        rooms: the most each of a job's drafters may draft; a job with a fixed width has its asks there already and must
        get them back. rows: tokens that other jobs are fed in the same pass.
        """

    def still_rests(self, jobs: Sequence[Job], rows: int) -> bool:
        """Whether it was decided that none of these jobs is drafted for, and that stands for this round, too: then it
        need not be asked for more. rows: as for `choose`."""

    def worth(self, drafter: str, jobs: Sequence[Job], drafts: Drafts) -> Sequence[int]:
        """How many tokens of each looked-up proposal to judge (`Drafts.matched`)."""

    def rests(self, jobs: Sequence[Job]) -> bool:
        """Whether none of the jobs whose width is free will get drafts in the next round, either."""

    def stands(self, *, surely: bool = False) -> bool:
        """Whether the next round will most likely be asked for the same; surely: almost certainly."""

    def learn(self, plan: Plan, drafts: Drafts, times: PassTimes, outcomes: Sequence[tuple[Job, Outcome]]) -> None:
        """What a round cost and brought."""

    def forget(self, job: Job) -> None:
        """The job is over."""


class Prices(NamedTuple):
    """Seconds that were measured before anything was asked for."""

    passes: Mapping[int, float]  # by rows
    drafts: Mapping[str, Mapping[tuple[int, int], float]]  # drafter -> by jobs and steps
    reads: Mapping[str, float] = {}
    longest: Mapping[str, int] = {}  # drafter -> tokens of its longest chain, if others would first have to be built


class WidthChooser:
    """What each job may be drafted, and of that what its request or the controller wants."""

    def __init__(self, target: ModelInfo, router: Router, controller: Controller, max_width: int) -> None:
        self._max_rewind = target.max_rewind
        self._trees = target.trees
        self._router = router
        self._max_width = max_width
        self.controller = controller

    def goes_on(self, plan: Plan, drafts: Drafts) -> list[int]:
        """Which deciding jobs most likely go on as they do now: plainly, if nothing is drafted, or with as many."""
        jobs = plan.deciding
        if plan.reading:
            return []
        is_asked = any(ask.width for asks in plan.asks for ask in asks)
        if any(drafts.counts) or (is_asked and all(job.width is not None for job in jobs)):
            is_sure = all(job.width is not None for job in jobs) or self.controller.stands(surely=True)
            return list(range(len(jobs))) if is_sure else []
        free = [job for job in jobs if job.drafters and job.width is None]
        if any(job.drafters and job.width for job in jobs) or (free and not self.controller.rests(free)):
            return []
        return [place for place, job in enumerate(jobs) if len(job.tokens) + 1 < job.limit]

    def stands(self, plan: Plan) -> bool:
        """Whether the same will most likely be drafted for these jobs in the next round."""
        return all(job.width is not None for job in plan.deciding) or self.controller.stands()

    def choose(self, jobs: Sequence[Job], rows: int) -> list[Choice]:
        """For every deciding job of a pass in which others are fed `rows` tokens."""
        if self.controller.still_rests(jobs, rows):
            return [PLAIN] * len(jobs)
        choices = [self._room(job) for job in jobs]
        if any(choice.asks and job.width is None for job, choice in zip(jobs, choices, strict=True)):
            chosen = self.controller.choose(jobs, [choice.asks for choice in choices], rows)
            choices = [
                PLAIN if not asks and choice[1:] == PLAIN[1:] else choice._replace(asks=_within(asks, choice.asks))
                for asks, choice in zip(chosen, choices, strict=True)
            ]
            for job, asks in zip(jobs, chosen, strict=True):
                job.wanted = tuple([ask.drafter for ask in asks])
        return choices

    def _room(self, job: Job) -> Choice:
        """The most that may be drafted for a job."""
        asked = job.width
        if asked == 0 or not job.drafters:
            return PLAIN
        if asked is None:
            asked = self._max_width if job.max_width is None else min(job.max_width, self._max_width)
        width = min(asked, job.limit - len(job.tokens) - 1)  # the round adds one token of the target's own
        if width <= 0:
            return PLAIN
        fallback = None
        tree = job.tree is not False if job.width is None else bool(job.tree)
        if tree and not self._trees:
            tree = False
            fallback = "the target reads chains only" if job.tree else None
        if self._max_rewind is not None and width > self._max_rewind:
            if self._max_rewind > 0:
                width, fallback = self._max_rewind, f"the target can rewind only {self._max_rewind} tokens"
            elif job.width is None:
                return Choice(fallback="the target cannot rewind, so drafting saves no pass")
            else:
                width, fallback = 1, "the target cannot rewind: one draft a round, judged before it is fed"
        try:
            ready = job.drafters
            if job.width is not None:  # a draft whose width is the engine's choice reads when it is wanted, not before
                ready = tuple(name for name in ready if self._router.lag(job, name) <= 0)
            elif len(job.tokens) - job.cached > 1:  # the end of a prompt: its hidden states are still to come
                ready = tuple(name for name in ready if not self._router.drafters[name].hidden)
        except DraftError as error:
            return Choice(error=error)
        if len(ready) < len(job.drafters) and len(job.tokens) - job.cached == 1:  # else the target is reading it, too
            fallback = READING
        return Choice(_asks(tuple(ready), width, tree), fallback)


@lru_cache(maxsize=256)  # there are few different ones, and every job has one in every round
def _asks(names: tuple[str, ...], width: int, tree: bool) -> tuple[Ask, ...]:
    return tuple(Ask(name, width, tree) for name in names)


def _within(asks: tuple[Ask, ...], room: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """No tree where the target reads none."""
    if room and room[0].tree:
        return asks
    return tuple(ask._replace(tree=False) if ask.tree else ask for ask in asks)
