"""Every way to draft, by kind of work: how many drafts are kept, and how quick it is beside plain decoding.

One engine holds all methods, so weights, prompts and code path are the same; the ways take turns on every prompt. Each
run has a tenant of its own: it finds neither cached pages nor past text of another, so reading the prompt, the draft's
prefill and learning are in the time.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from outrider.bench.work import OWN, Work
from outrider.engine.engine import Engine
from outrider.tokenizer.base import ChatTokenizer
from outrider.types import Result


class Way(NamedTuple):
    """One way to decode."""

    method: str
    width: int | None  # None: auto
    tree: bool | None = None

    @property
    def name(self) -> str:
        if self.method == "none":
            return "plain"
        shape = "auto" if self.width is None else f"tree of {self.width}" if self.tree else f"width {self.width}"
        return f"{self.method}, {shape}"


@dataclass(slots=True)
class Tally:
    """What came of one way on one kind of work."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    wide_rounds: int = 0
    tokens: int = 0
    same: bool = True  # whether every answer was the plain one, token by token
    seconds: list[float] = field(default_factory=list)  # of all its prompts, repeat by repeat

    def add(self, result: Result) -> None:
        counts = result.statistics
        self.drafted += counts.drafted
        self.accepted += counts.accepted
        self.rounds += counts.rounds
        self.wide_rounds += counts.wide.rounds
        self.tokens += counts.tokens


@dataclass(frozen=True, slots=True)
class Reading:
    """One row of the table. `speed` is plain seconds over this way's, with the 90 % interval of its median."""

    kind: str
    way: str
    acceptance: float
    tokens_per_round: float
    drafting: float  # share of the rounds that had a draft
    speed: float
    low: float
    high: float
    same: bool


def readings(
    model: str,
    *,
    draft: str = "ngram,suffix",
    work: Work | None = None,
    quick: bool = False,
    threads: int | None = None,
    widths: Sequence[int] = (4,),
    trees: Sequence[int] = (16,),
    num_prompts: int = 2,
    num_tokens: int = 64,
    repeats: int = 5,
) -> Iterator[Reading]:
    """Greedy answers, kind after kind."""
    engine = Engine.load(model, draft=draft, threads=threads)
    if quick:
        num_prompts, num_tokens, repeats = 1, 32, 2
    methods = list(engine.methods)
    plain = Way("none", 0)
    ways = [plain]
    for method in methods:
        if method != "none":
            ways += [Way(method, width) for width in widths] + [Way(method, width, True) for width in trees]
            ways.append(Way(method, None))
    tenants = (f"run-{number}" for number in itertools.count())
    for kind, prompts in (work or OWN).items():
        encoded = [_encode(engine, prompt)[: engine.info.context - num_tokens - 1] for prompt in prompts[:num_prompts]]
        tallies = {way: Tally() for way in ways}
        for repeat in range(repeats + 1):  # the first warms up and is not counted
            spent = dict.fromkeys(ways, 0.0)
            for prompt in encoded:
                truth: list[int] = []
                order = ways if repeat % 2 == 0 else [plain, *ways[:0:-1]]
                for way in order:
                    started = time.perf_counter()
                    result = engine.generate(
                        prompt,
                        max_tokens=num_tokens,
                        temperature=0.0,
                        ignore_eos=True,
                        method=way.method,
                        width=way.width,
                        tree=way.tree,
                        tenant=next(tenants),
                    )
                    spent[way] += time.perf_counter() - started
                    truth = truth or result.token_ids
                    tallies[way].same &= truth == result.token_ids
                    if repeat:
                        tallies[way].add(result)
            if repeat:
                for way, seconds in spent.items():
                    tallies[way].seconds.append(seconds)
        for way, tally in tallies.items():
            yield _reading(kind, way, tally, tallies[plain])


def _encode(engine: Engine, prompt: str) -> list[int]:
    if isinstance(engine.tokenizer, ChatTokenizer):
        return engine.encode_chat([{"role": "user", "content": prompt}])
    return engine.encode(prompt)


def _reading(kind: str, way: Way, tally: Tally, plain: Tally) -> Reading:
    ratios = [base / own for base, own in zip(plain.seconds, tally.seconds, strict=True)]
    low, high = interval(ratios)
    return Reading(
        kind=kind,
        way=way.name,
        acceptance=tally.accepted / tally.drafted if tally.drafted else 0.0,
        tokens_per_round=tally.tokens / tally.rounds,
        drafting=tally.wide_rounds / tally.rounds,
        speed=median(ratios),
        low=low,
        high=high,
        same=tally.same,
    )


def interval(values: Sequence[float], share: float = 0.9, resamples: int = 2000) -> tuple[float, float]:
    """Where the median lies with this probability, by drawing the repeats again (bootstrap, own generator)."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1.0 - share) / 2.0
    return medians[int(tail * resamples)], medians[int((1.0 - tail) * resamples) - 1]
