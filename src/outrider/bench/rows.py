"""From answers to the rows of a comparison: ratios, medians, intervals, and whether the answers were plain's.

Everything is compared within one repeat and with plain decoding of the same engine, so that what slows the machine down
for a while slows both. The ratio of a kind of work is plain's seconds for its prompts over this way's. The row of all
kinds is the geometric mean of their ratios: every kind weighs the same, however long its prompts are.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from statistics import mean, median
from typing import Literal, NamedTuple

from outrider.bench.contest import OWN_ENGINE, PLAIN, Answer, Style
from outrider.metrics import kept_by_place

ALL = "all"
FEW = 5  # repeats: of less than these the range is told instead of an interval
SHARE = 0.9


class Span(NamedTuple):
    """A median and where it lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Span | None:
        return cls(median(values), *interval(values)) if values else None


@dataclass(frozen=True, slots=True)
class Row:
    """One way to decode on one kind of work, or on `all`. None: not known, or there is no such thing.

    `identical` says whether every answer was plain's of the same engine; `first_difference` is the earliest token that
    was not. `agrees_with_outrider` is how much of the answers, on average, comes before the first difference from our
    own plain ones: whether engines run the same model. `time_split` is in shares of the whole time. `ratio_after_first`
    is of the time after the first token: reading a long prompt takes as long with drafts as without.
    """

    engine: str
    method: str
    width: int | Literal["auto"]
    tree: bool
    category: str
    tokens_per_s: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    ratio_to_plain: float | None
    ratio_to_plain_low: float | None
    ratio_to_plain_high: float | None
    ratio_after_first: float | None
    tokens_per_round: float | None
    acceptance_rate: float | None
    acceptance_by_position: list[float] | None
    time_split: dict[str, float] | None
    first_token_s: float
    identical: bool | None
    differences: int | None
    first_difference: int | None
    agrees_with_outrider: float | None
    answers: int
    repeats: int

    @property
    def style(self) -> Style:
        return Style(self.engine, self.method, self.width, self.tree)


class Record:
    """What everybody answered, by repeat and task. Repeat 0 warms up: it counts for identity, not for time."""

    def __init__(self, kinds: Sequence[str], *, is_greedy: bool = True) -> None:
        """kinds: of the tasks, in their order. Where chance decides, engines cannot agree with each other."""
        self.kinds = list(kinds)
        self._is_greedy = is_greedy
        self._answers: dict[Style, dict[int, dict[int, Answer]]] = {}

    def add(self, style: Style, repeat: int, task: int, answer: Answer) -> None:
        self._answers.setdefault(style, {}).setdefault(repeat, {})[task] = answer

    def rows(self, uncoupled: Collection[Style] = ()) -> Iterator[Row]:
        """Of everybody who answered something that counts; kinds of work in the order they came, then all of them.

        uncoupled: whose answers cannot be plain's, because chance decides.
        """
        kinds = list(dict.fromkeys(self.kinds))
        for style in self._answers:
            for kind in [*kinds, ALL] if len(kinds) > 1 else kinds:
                row = self._row(style, kind, is_comparable=style not in uncoupled)
                if row is not None:
                    yield row

    def _row(self, style: Style, kind: str, *, is_comparable: bool) -> Row | None:
        kinds = list(dict.fromkeys(self.kinds)) if kind == ALL else [kind]
        taken = {repeat: answers for repeat, answers in self._taken(style, kinds).items() if answers}
        if not taken:
            return None
        answers = [answer for by_task in taken.values() for answer in by_task.values()]
        speeds = [_speed(list(by_task.values())) for by_task in taken.values()]
        speed = Span.of(speeds)
        assert speed is not None
        ratio, after = (Span.of(self._ratios(style, kinds, part)) for part in (_whole, _after_first))
        rounds, drafted = (sum(getattr(answer, name) for answer in answers) for name in ("rounds", "drafted"))
        differences = self._differences(style, kinds) if is_comparable else None
        told = None if differences is None else [at for at in differences if at is not None]
        return Row(
            engine=style.engine,
            method=style.method,
            width=style.width,
            tree=style.is_tree,
            category=kind,
            tokens_per_s=speed.median,
            tokens_per_s_low=speed.low,
            tokens_per_s_high=speed.high,
            ratio_to_plain=None if ratio is None else ratio.median,
            ratio_to_plain_low=None if ratio is None else ratio.low,
            ratio_to_plain_high=None if ratio is None else ratio.high,
            ratio_after_first=None if after is None else after.median,
            tokens_per_round=sum(answer.num_tokens for answer in answers) / rounds if rounds else None,
            acceptance_rate=sum(answer.accepted for answer in answers) / drafted if drafted else None,
            acceptance_by_position=_by_position(answers),
            time_split=_split(answers),
            first_token_s=median(answer.first_s for answer in answers),
            identical=None if told is None else not told,
            differences=None if told is None else len(told),
            first_difference=min(told) if told else None,
            agrees_with_outrider=self._agreement(style, kinds) if is_comparable else None,
            answers=len(answers),
            repeats=len(taken),
        )

    def _taken(self, style: Style, kinds: Collection[str]) -> dict[int, dict[int, Answer]]:
        """By repeat and task, what counts: whole repeats; where there is none yet, what there is of the first."""
        wanted = {task for task, kind in enumerate(self.kinds) if kind in kinds}
        found = {
            repeat: {task: answer for task, answer in answers.items() if task in wanted}
            for repeat, answers in self._answers.get(style, {}).items()
            if repeat > 0
        }
        most = max(map(len, found.values()), default=0)
        return {repeat: answers for repeat, answers in found.items() if len(answers) == most}

    def _ratios(self, style: Style, kinds: Sequence[str], part: Callable[[Answer], float]) -> list[float]:
        """One for each repeat: the geometric mean over the kinds, of plain's seconds over this way's, in a part of the
        time."""
        by_repeat: dict[int, list[float]] = {}
        for kind in kinds:
            ours, plain = self._taken(style, [kind]), self._taken(_plain(style), [kind])
            for repeat in ours.keys() & plain.keys():
                both = ours[repeat].keys() & plain[repeat].keys()
                if both:
                    seconds = sum(part(ours[repeat][task]) for task in both)
                    if seconds:
                        ratio = sum(part(plain[repeat][task]) for task in both) / seconds
                        by_repeat.setdefault(repeat, []).append(ratio)
        most = max(map(len, by_repeat.values()), default=0)
        return [prod(ratios) ** (1.0 / most) for _, ratios in sorted(by_repeat.items()) if len(ratios) == most]

    def _differences(self, style: Style, kinds: Collection[str]) -> list[int | None] | None:
        """Of every prompt's answer: where it leaves plain's first answer, None when nowhere. None without any plain."""
        found = [
            first_difference(given, true)
            for answer, truth in self._beside(style, _plain(style), kinds)
            for given, true in zip(answer.tokens, truth.tokens, strict=True)
        ]
        return found or None

    def _agreement(self, style: Style, kinds: Collection[str]) -> float | None:
        own = Style(OWN_ENGINE, PLAIN, 0)
        if not self._is_greedy and style.engine != own.engine:
            return None
        shares = []
        for answer, truth in self._beside(style, own, kinds):
            for given, true in zip(answer.tokens, truth.tokens, strict=True):
                at = first_difference(given, true)
                shares.append(1.0 if at is None else at / len(true))
        return mean(shares) if shares else None

    def _beside(self, style: Style, other: Style, kinds: Collection[str]) -> Iterator[tuple[Answer, Answer]]:
        """Every answer, warming up included, with the other's first answer to the same task."""
        firsts: dict[int, Answer] = {}
        for _, answers in sorted(self._answers.get(other, {}).items()):
            for task, answer in answers.items():
                firsts.setdefault(task, answer)
        for answers in self._answers.get(style, {}).values():
            for task, answer in answers.items():
                if self.kinds[task] in kinds and task in firsts:
                    yield answer, firsts[task]


def _plain(style: Style) -> Style:
    return Style(style.engine, PLAIN, 0)


def _whole(answer: Answer) -> float:
    return answer.seconds


def _after_first(answer: Answer) -> float:
    """Seconds after the first token. Of prompts answered together there is no one such moment."""
    return answer.seconds - answer.first_s if len(answer.tokens) == 1 else 0.0


def _speed(answers: Sequence[Answer]) -> float:
    return sum(answer.num_tokens for answer in answers) / sum(answer.seconds for answer in answers)


def _by_position(answers: Sequence[Answer]) -> list[float] | None:
    accepted, depth = Counter[int](), Counter[int]()
    for answer in answers:
        accepted.update(answer.rounds_by_accepted)
        depth.update(answer.rounds_by_depth)
    return kept_by_place(accepted, depth) or None


def _split(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Shares of the whole time; `other` is what came between the passes."""
    splits: list[Mapping[str, float]] = [answer.split for answer in answers if answer.split is not None]
    if not splits:
        return None
    whole = sum(answer.seconds for answer in answers)
    shares = {name: sum(split[name] for split in splits) / whole for name in splits[0]}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def first_difference(given: Sequence[int], true: Sequence[int]) -> int | None:
    """The place of the first token that is not the same, or that only one of them has; None when there is none."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(given, true, strict=False)))
    return None if same == len(given) == len(true) else same


def interval(values: Sequence[float], resamples: int = 2000) -> tuple[float, float]:
    """Where the median lies nine times out of ten, by drawing the repeats again (bootstrap); of few, their range."""
    if len(values) < FEW:
        return min(values), max(values)
    generator = random.Random(0)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1.0 - SHARE) / 2.0
    return medians[int(tail * resamples)], medians[int((1.0 - tail) * resamples) - 1]
