"""What it costs to let a job draft for a round only to see what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.spec.choice import DraftSeconds, PassSeconds

LEAST = 0.02  # of a pass, shared by its jobs: what a probe costs at least, so that wide ones are not for nothing


class Probe(NamedTuple):
    width: int
    loss_s: float  # expected, against not drafting
    seconds: float  # of the pass and of drafting


class Probes(NamedTuple):
    """Jobs that are probed in one round: they share draft steps."""

    rows: float  # of the pass
    steps: dict[str, list[float]]  # drafter -> jobs in each step

    def plus(self, name: str, width: int) -> Probes:
        steps = list(self.steps.get(name, []))
        steps += [0.0] * (width - len(steps))
        for place in range(width):
            steps[place] += 1.0
        return Probes(self.rows + width, {**self.steps, name: steps})

    def seconds(self, name: str, draft_s: DraftSeconds) -> float:
        """Of drafting."""
        steps = self.steps.get(name)
        return draft_s(name, len(steps), sum(steps) / len(steps)) if steps else 0.0


class Candidate(NamedTuple):
    """A job and a drafter that rests."""

    drafter: str
    chances: Sequence[float]  # that a proposal is kept up to each place
    answers: float  # how often there is one
    entry_s: float  # seconds of catching up


def cheapest(
    candidate: Candidate, others: Probes, pass_s: PassSeconds, draft_s: DraftSeconds, rate: float, num_jobs: int
) -> Probe:
    """The width that loses the least per token judged, beside others; `rate` is tokens per second without."""
    name, chances, answers, entry_s = candidate
    plain_s, before_s = pass_s(others.rows), others.seconds(name, draft_s)
    # One of many that gets ahead leaves the others their passes: all it saves is its row
    token_s = 1.0 / rate if num_jobs == 1 else min(1.0 / rate, plain_s - pass_s(others.rows - 1.0))
    best, best_value, gained, judged = Probe(1, 0.0, 0.0), float("inf"), 0.0, 0.0
    for width, chance in enumerate(chances, 1):
        judged += chances[width - 2] if width > 1 else 1.0
        gained += chance * answers
        drafting_s = others.plus(name, width).seconds(name, draft_s) - before_s + entry_s
        seconds = pass_s(others.rows + width * answers) + drafting_s
        loss_s = max(0.0, seconds - plain_s - gained * token_s)
        value = (loss_s + LEAST * plain_s / num_jobs) / judged
        if value < best_value:
            best, best_value = Probe(width, loss_s, seconds), value
    return best
