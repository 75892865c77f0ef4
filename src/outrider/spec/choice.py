"""The widths with the most expected tokens per second for a batch: arithmetic on what is known, nothing is learned.

    tokens per second = (one token per job + chances of the drafted ones) / (target pass of all rows + drafting)

Draft steps are shared: the second token of every job is drafted in the second step. So a choice is how many steps to
make, and how likely a token must be to deserve its row; both are tried out, for every drafter alone and all in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

LEAST_CHANCES = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85)  # what a token must promise: tried where jobs differ
WORTH = 0.003  # what every further step must add: requests that drift apart share fewer passes

PassSeconds = Callable[[float], float]  # rows -> seconds
DraftSeconds = Callable[[str, float, float], float]  # drafter, steps, rows of a step on average -> seconds


class Prospect(NamedTuple):
    """What asking a drafter promises for each job of a group, place by place; of a tree, level by level."""

    chances: Sequence[float]  # that a proposal is kept up to there
    reach: Sequence[float]  # how often a proposal goes that far
    answers: float = 1.0  # how often there is one
    nodes: float = 1.0  # rows of a place
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
    steps: dict[str, list[float]] = field(default_factory=dict)  # drafter -> rows of each step it makes anyway


class Best(NamedTuple):
    """A choice: `places[group][drafter]`, with what is expected of it."""

    rate: float  # tokens per second
    rows: float
    tokens: float
    draft_s: float
    places: list[dict[str, int]]


class Ladder(NamedTuple):
    """What each number of steps of one drafter adds to a batch, 0 steps first."""

    tokens: list[float]
    rows: list[float]
    seconds: list[float]


def plain_rate(batch: Batch, pass_s: PassSeconds, draft_s: DraftSeconds) -> float:
    """Tokens per second without the drafts that are to be chosen."""
    return batch.tokens / (pass_s(batch.rows) + sum(_given_s(name, batch, draft_s) for name in batch.steps))


def best_choice(
    groups: Sequence[Group], batch: Batch, pass_s: PassSeconds, draft_s: DraftSeconds, most_rows: float
) -> Best | None:
    """The best choice that drafts at all; None where nothing may be drafted."""
    best: Best | None = None
    names = list(dict.fromkeys(name for group in groups for name in group.prospects))
    for asked in [[name] for name in names] + ([names] if len(names) > 1 else []):
        given_s = sum(_given_s(name, batch, draft_s) for name in batch.steps if name not in asked)
        for least in LEAST_CHANCES if len(groups) > 1 else LEAST_CHANCES[:1]:
            ladders = [_ladder(name, asked, groups, batch, least, draft_s) for name in asked]
            steps, found = _climb(ladders, batch, given_s, pass_s, most_rows)
            if any(steps) and (best is None or found.rate > best.rate):
                limits = dict(zip(asked, steps, strict=True))
                best = found._replace(places=[_places(group, limits, least) for group in groups])
    return best


def hope(groups: Sequence[Group], batch: Batch, pass_s: PassSeconds, draft_s: DraftSeconds) -> float:
    """Tokens per second if all drafts were kept."""
    sure = [
        Group(
            group.members,
            {name: one._replace(chances=[1.0] * len(one.chances)) for name, one in group.prospects.items()},
        )
        for group in groups
    ]
    best = best_choice(sure, batch, pass_s, draft_s, float("inf"))
    return 0.0 if best is None else best.rate


def _given_s(name: str, batch: Batch, draft_s: DraftSeconds) -> float:
    given = batch.steps.get(name, [])
    return draft_s(name, len(given), sum(given) / len(given)) if given else 0.0


def _ladder(
    name: str, asked: Sequence[str], groups: Sequence[Group], batch: Batch, least: float, draft_s: DraftSeconds
) -> Ladder:
    tokens: list[float] = []
    rows: list[float] = []
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
        for place, (chance, share) in enumerate(zip(prospect.chances, prospect.reach, strict=True)):
            if chance < least:
                break
            tokens[place] += weight * share * chance
            rows[place] += weight * share * prospect.nodes
    given = batch.steps.get(name, [])
    seconds, drafted = [_given_s(name, batch, draft_s)], sum(given)
    for step, count in enumerate(rows, 1):
        drafted += count
        depth = max(step, len(given))
        seconds.append(entry_s + draft_s(name, depth, max(drafted / depth, 0.01)))
    return Ladder([0.0, *accumulate(tokens)], [0.0, *accumulate(rows)], seconds)


def _climb(
    ladders: Sequence[Ladder], batch: Batch, given_s: float, pass_s: PassSeconds, most_rows: float
) -> tuple[list[int], Best]:
    """The numbers of steps with the best rate: each ladder in turn, twice where there are several."""
    steps = [0] * len(ladders)
    best = Best(0.0, 0.0, 0.0, 0.0, [])
    for _ in range(2 if len(ladders) > 1 else 1):
        for index, ladder in enumerate(ladders):
            others = [(at, step) for place, (at, step) in enumerate(zip(ladders, steps, strict=True)) if place != index]
            tokens = batch.tokens + sum([at.tokens[step] for at, step in others])
            rows = batch.rows + sum([at.rows[step] for at, step in others])
            seconds = given_s + sum([at.seconds[step] for at, step in others])
            for step in range(0 if others else 1, len(ladder.tokens)):
                all_rows = rows + ladder.rows[step]
                if all_rows > most_rows and step > 1:
                    break
                all_tokens, drafting_s = tokens + ladder.tokens[step], seconds + ladder.seconds[step]
                rate = all_tokens / (pass_s(all_rows) + drafting_s)
                if rate > best.rate * (1.0 + WORTH * (step - steps[index])):
                    best = Best(rate, all_rows, all_tokens, drafting_s, [])
                    steps[index] = step
    return steps, best


def _places(group: Group, limits: dict[str, int], least: float) -> dict[str, int]:
    return {
        name: sum(chance >= least for chance in prospect.chances[: limits[name]])
        for name, prospect in group.prospects.items()
        if name in limits
    }
