"""The widths with the most expected tokens per second for a batch: arithmetic on what is known, nothing is learned here.

    tokens per second = (one token per job + chances of the drafted ones) / (target pass of all rows + draft steps)

Draft steps are shared: the second token of every job is drafted in the second step. So a choice is how many steps to
make, and how likely a token must be to deserve its row; both are tried out, for every drafter alone and for all in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

LEAST_CHANCES = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85)  # what a token must promise: tried where jobs differ

PassSeconds = Callable[[float], float]  # rows -> seconds
StepSeconds = Callable[[str, float], float]  # drafter, jobs that draft in the step -> seconds


class Prospect(NamedTuple):
    """What asking a drafter promises for each job of a group."""

    chances: Sequence[float]  # that a proposal is kept up to each place
    reach: Sequence[float]  # how often a proposal goes that far, when the drafter is asked
    nodes: float = 1.0  # rows of each place: more than one in a tree
    answers: float = 1.0  # how often it has something to say
    entry_s: float = 0.0  # seconds of catching up, as far as this round has to repay them


@dataclass(slots=True)
class Group:
    """Jobs alike: they get the same widths."""

    members: list[int]
    prospects: dict[str, Prospect]  # by drafter, in the order they are asked


@dataclass(slots=True)
class Batch:
    """A pass as it would be without the drafts that are to be chosen."""

    rows: float
    tokens: float
    draft_s: float = 0.0


class Best(NamedTuple):
    """A choice: `widths[group][drafter]`, and its tokens per second."""

    rate: float
    rows: float
    tokens: float
    draft_s: float
    widths: list[dict[str, int]]


class Ladder(NamedTuple):
    """What each number of steps of one drafter adds to a batch: tokens, rows and seconds, 0 steps first."""

    tokens: list[float]
    rows: list[float]
    seconds: list[float]


def best_choice(
    groups: Sequence[Group], batch: Batch, pass_s: PassSeconds, step_s: StepSeconds, most_rows: float
) -> Best | None:
    """The best choice that drafts at all; None where nothing may be drafted."""
    best: Best | None = None
    names = list(dict.fromkeys(name for group in groups for name in group.prospects))
    thresholds = LEAST_CHANCES if len(groups) > 1 else LEAST_CHANCES[:1]
    for asked in [[name] for name in names] + ([names] if len(names) > 1 else []):
        for least in thresholds:
            ladders = [_ladder(name, asked, groups, least, step_s) for name in asked]
            steps, rate, rows, tokens, draft_s = _climb(ladders, batch, pass_s, most_rows)
            if any(steps) and (best is None or rate > best.rate):
                limits = dict(zip(asked, steps, strict=True))
                best = Best(rate, rows, tokens, draft_s, [_widths(group, limits, least) for group in groups])
    return best


def _ladder(name: str, asked: Sequence[str], groups: Sequence[Group], least: float, step_s: StepSeconds) -> Ladder:
    tokens: list[float] = []
    rows: list[float] = []
    jobs: list[float] = []
    entry_s = 0.0
    for group in groups:
        prospect = group.prospects.get(name)
        if prospect is None or prospect.chances[0] < least:
            continue
        weight = float(len(group.members))
        for earlier in asked[: asked.index(name)]:  # it is asked when they are silent
            if earlier in group.prospects:
                weight *= 1.0 - group.prospects[earlier].answers
        entry_s += weight * prospect.entry_s
        missing = len(prospect.chances) - len(tokens)
        if missing > 0:
            tokens += [0.0] * missing
            rows += [0.0] * missing
            jobs += [0.0] * missing
        for place, (chance, share) in enumerate(zip(prospect.chances, prospect.reach, strict=True)):
            if chance < least:
                break
            tokens[place] += weight * share * chance
            rows[place] += weight * share * prospect.nodes
            jobs[place] += weight * share * prospect.nodes
    seconds = [step_s(name, count) if count > 0.0 else 0.0 for count in jobs]
    if seconds:
        seconds[0] += entry_s
    return Ladder([0.0, *accumulate(tokens)], [0.0, *accumulate(rows)], [0.0, *accumulate(seconds)])


def _climb(
    ladders: Sequence[Ladder], batch: Batch, pass_s: PassSeconds, most_rows: float
) -> tuple[list[int], float, float, float, float]:
    """The numbers of steps with the best rate: each ladder in turn, twice where there are several."""
    steps = [0] * len(ladders)
    best = (0.0, 0.0, 0.0, 0.0)
    for _ in range(2 if len(ladders) > 1 else 1):
        for index, ladder in enumerate(ladders):
            others = [(at, step) for place, (at, step) in enumerate(zip(ladders, steps, strict=True)) if place != index]
            tokens = batch.tokens + sum([at.tokens[step] for at, step in others])
            rows = batch.rows + sum([at.rows[step] for at, step in others])
            seconds = batch.draft_s + sum([at.seconds[step] for at, step in others])
            for step in range(0 if others else 1, len(ladder.tokens)):
                total_rows = rows + ladder.rows[step]
                if total_rows > most_rows and step > 1:
                    break
                rate = (tokens + ladder.tokens[step]) / (pass_s(total_rows) + seconds + ladder.seconds[step])
                if rate > best[0]:
                    best = rate, total_rows, tokens + ladder.tokens[step], seconds + ladder.seconds[step]
                    steps[index] = step
    return steps, *best


def _widths(group: Group, limits: dict[str, int], least: float) -> dict[str, int]:
    return {
        name: sum(chance >= least for chance in prospect.chances[: limits[name]])
        for name, prospect in group.prospects.items()
        if name in limits
    }
