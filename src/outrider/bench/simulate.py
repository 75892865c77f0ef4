"""A simulator: what speculation would bring, from acceptance, costs and load. The engine is the real one; the model is
a mock that knows the answer, and the clock is not real.

A pass of n rows takes `pass_s(n)` seconds, a drafted token `draft_s`, and everything around a pass `round_s`. A draft
is right at its first place with probability acceptance[0], at its first two with acceptance[1], and so on.

`measured` takes these numbers from a real model, one by one, and compares what the simulator makes of them with what
was measured as a whole.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from outrider.backends.base import Spans
from outrider.backends.mock import MockBackend
from outrider.bench import kernels
from outrider.bench.work import OWN, Work
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.draft.base import DrafterInfo
from outrider.draft.lookup import NoDrafter, certain
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.types import Drafts, Job, Request, SamplingParams, Scores

MODEL = MockConfig(vocab_size=16, seed=3, order=1, context=4096)
LOOKUPS = ("ngram", "suffix")
CURVES: dict[str, dict[int, float]] = {  # rows of a pass -> its cost, 1 for a single row
    "flat": {1: 1.0, 64: 1.63},
    "compute": {1: 1.0, 64: 64.0},
    "cpu": {1: 1.0, 2: 3.6, 8: 3.6, 64: 20.4},
    "gpu": {1: 1.0, 32: 1.15, 64: 2.3},
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of a drafted token, of asking for drafts at all, of what surrounds a pass. `curve` has some numbers of
    rows; between them it is straight, beyond the last it goes on."""

    curve: Mapping[int, float]
    draft_s: float = 0.0
    look_s: float = 0.0
    round_s: float = 0.0

    def pass_s(self, rows: int) -> float:
        known = sorted(self.curve)
        if rows <= known[0]:
            return self.curve[known[0]]
        right = min(bisect_left(known, rows), len(known) - 1)
        low, high = known[right - 1], known[right]
        share = (rows - low) / (high - low)
        return (1.0 - share) * self.curve[low] + share * self.curve[high]


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated. `depths` says in which share of the rounds the draft has so many tokens to say (0: none);
    left out, it always fills the width."""

    acceptance: tuple[float, ...]
    costs: Costs
    width: int | None  # None: the engine chooses
    batch: int = 1
    depths: Mapping[int, float] | None = None
    num_tokens: int = 400


@dataclass(frozen=True, slots=True)
class Prediction:
    """`speed` is plain seconds over this way's."""

    speed: float
    tokens_per_round: float
    widths: Mapping[int, int]


def simulate(case: Case) -> Prediction:
    """Both ways of decoding, each with a fresh engine."""
    plain_s, _ = _run(case, 0)
    seconds, engine = _run(case, case.width)
    counts = engine.statistics
    return Prediction(plain_s / seconds, counts.tokens_per_round, dict(sorted(counts.widths.items())))


def constant(acceptance: float, width: int) -> tuple[float, ...]:
    """The same chance for every draft whose predecessors were right."""
    return tuple(acceptance ** (place + 1) for place in range(width))


def _run(case: Case, width: int | None) -> tuple[float, Engine]:
    clock = VirtualClock()
    target = _Priced(case.costs, clock)
    drafter = _Prophet(target, case, clock)
    engine = Engine.load(target, draft=drafter, max_batch=case.batch, clock=clock, threaded=False)
    greedy = SamplingParams(temperature=0.0)
    requests = [
        Request(prompt=[index % MODEL.vocab_size], sampling=greedy, max_tokens=case.num_tokens, width=width)
        for index in range(case.batch)
    ]
    engine.generate(requests)
    return clock.now(), engine


class _Priced(MockBackend):
    """A mock whose passes take as long as the costs say."""

    def __init__(self, costs: Costs, clock: VirtualClock) -> None:
        super().__init__(MODEL)
        self._costs, self._time = costs, clock
        self.following = [int(np.argmax(self.logits_after([token]))) for token in range(MODEL.vocab_size)]

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        self._time.sleep(self._costs.pass_s(sum(spans.counts)) + self._costs.round_s)
        return super().score(spans, hidden)


class _Prophet(NoDrafter):
    """Knows what comes, and is wrong as often as the case says."""

    info = DrafterInfo(name="prophet")

    def __init__(self, target: _Priced, case: Case, clock: VirtualClock) -> None:
        self._following, self._case, self._time = target.following, case, clock
        self._dice = np.random.default_rng(0)
        self._depths = None if case.depths is None else list(case.depths)
        self._shares = None if case.depths is None else list(case.depths.values())

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        proposals = [self._proposal(job, width) for job, width in zip(jobs, widths, strict=True)]
        costs = self._case.costs
        self._time.sleep(costs.look_s + costs.draft_s * max((len(one) for one in proposals), default=0))
        return certain(proposals)

    def _proposal(self, job: Job, width: int) -> list[int]:
        depth = min(width, len(self._case.acceptance))
        if depth and self._depths is not None:
            depth = min(depth, int(self._dice.choice(self._depths, p=self._shares)))
        chance, token, tokens = self._dice.random(), job.tokens[-1], list[int]()
        for share in self._case.acceptance[:depth]:
            token = self._following[token] if chance < share else (self._following[token] + 1) % MODEL.vocab_size
            tokens.append(token)
        return tokens


@dataclass(frozen=True, slots=True)
class Setting:
    """A way of decoding a real model."""

    draft: str
    width: int
    batch: int = 1

    @property
    def name(self) -> str:
        return f"{self.draft}, width {self.width}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was predicted and what was measured, as ratios to plain decoding; the range is that of the repeats."""

    setting: Setting
    predicted: float
    measured: float
    low: float
    high: float
    acceptance: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


@dataclass(slots=True)
class _Taken:
    """What the runs of one way took."""

    seconds: list[float] = field(default_factory=list)  # of each repeat
    tokens: int = 0
    rounds: int = 0
    wide: int = 0
    drafted: int = 0
    draft_s: float = 0.0
    around_s: float = 0.0  # everything but passes and drafts
    passes: int = 0
    kept: dict[int, int] = field(default_factory=dict)  # accepted -> rounds with a draft
    deep: dict[int, int] = field(default_factory=dict)  # depth -> rounds


def measured(
    model: str,
    settings: Sequence[Setting],
    *,
    work: Work | None = None,
    num_tokens: int = 64,
    num_prompts: int = 4,
    repeats: int = 5,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Verdict]:
    """Each setting beside plain decoding of the same batch, in turn; then the simulator's opinion."""
    if not settings:
        raise ConfigError("name at least one draft and width to compare", param="draft")
    drafts = ",".join(dict.fromkeys(setting.draft for setting in settings))
    engine = Engine.load(model, draft=drafts, threads=threads, threaded=False)
    prompts = [engine.encode(prompt)[:256] for some in (work or OWN).values() for prompt in some[:1]][:num_prompts]
    names = dict(zip(drafts.split(","), engine.methods[1:], strict=True))
    tenants = (f"run-{number}" for number in itertools.count())
    context = int(median(len(prompt) for prompt in prompts)) + num_tokens // 2
    rows = sorted({1, *kernels.ROWS[:9], *(s.batch * (s.width + 1) for s in settings), *(s.batch for s in settings)})
    points = kernels.curve(engine.loop.target, rows, context, 5)
    curve = {count: median(seconds) for count, seconds in points.items()}
    for number, setting in enumerate(settings):
        plain, wide = _Taken(), _Taken()
        for repeat in range(repeats + 1):  # the first warms up and is not counted
            for taken, method, width in ((plain, "none", 0), (wide, names[setting.draft], setting.width)):
                seconds = 0.0
                for start in range(0, len(prompts), setting.batch):
                    group = [prompts[(start + index) % len(prompts)] for index in range(setting.batch)]
                    requests = [
                        Request(
                            prompt=prompt,
                            sampling=SamplingParams(temperature=0.0),
                            max_tokens=num_tokens,
                            ignore_eos=True,
                            method=method,
                            width=width,
                            tree=False,
                            tenant=next(tenants),
                        )
                        for prompt in group
                    ]
                    seconds += _decode(engine, requests, taken if repeat else _Taken())
                if repeat:
                    taken.seconds.append(seconds)
        if progress is not None:
            progress(number + 1, len(settings))
        yield _verdict(setting, plain, wide, curve)


def _decode(engine: Engine, requests: Sequence[Request], taken: _Taken) -> float:
    """Seconds from the moment all prompts are read to the last token."""
    streams = engine.open_streams(requests)
    while any(not stream.tokens for stream in streams):
        engine.step()
    engine.reset_statistics()
    started = time.perf_counter()
    while engine.num_requests:
        engine.step()
    seconds = time.perf_counter() - started
    counts = engine.statistics
    taken.tokens += counts.tokens
    taken.rounds += counts.rounds
    taken.wide += counts.draft_rounds
    taken.drafted += counts.drafted
    taken.passes += counts.passes
    taken.draft_s += counts.draft_s
    taken.around_s += seconds - counts.score_s - counts.draft_s
    for own, more in ((taken.kept, counts.rounds_by_accepted), (taken.deep, counts.rounds_by_depth)):
        for key, times in more.items():
            own[key] = own.get(key, 0) + times
    return seconds


def _verdict(setting: Setting, plain: _Taken, wide: _Taken, curve: Mapping[int, float]) -> Verdict:
    ratios = [base / own for base, own in zip(plain.seconds, wide.seconds, strict=True)]
    acceptance = tuple(_past(wide.kept, place) / _past(wide.deep, place) for place in range(max(wide.deep, default=0)))
    depths = {0: 1.0 - wide.wide / wide.rounds} | {depth: times / wide.rounds for depth, times in wide.deep.items()}
    # What surrounds a pass grows with its rows (drawing, judging), so it belongs to the curve.
    around = {way: taken.around_s / taken.passes for way, taken in (("plain", plain), ("wide", wide))}
    rows = {"plain": setting.batch, "wide": setting.batch * (1 + wide.drafted / wide.rounds)}
    slope = (around["wide"] - around["plain"]) / max(rows["wide"] - rows["plain"], 1e-9)
    whole = {
        count: seconds + around["plain"] + max(0.0, slope) * (count - rows["plain"]) for count, seconds in curve.items()
    }
    # A lookup costs the same whatever it finds; a model's draft costs by the token.
    is_lookup, drafting = setting.draft in LOOKUPS, wide.draft_s / wide.passes
    per_token = 0.0 if is_lookup else drafting / setting.width
    case = Case(
        acceptance=acceptance,
        costs=Costs(whole, per_token, drafting if is_lookup else 0.0),
        width=setting.width,
        batch=setting.batch,
        depths=depths,
    )
    return Verdict(setting, simulate(case).speed, median(ratios), min(ratios), max(ratios), acceptance)


def _past(rounds: Mapping[int, int], place: int) -> int:
    """Rounds whose count goes beyond `place`."""
    return sum(times for count, times in rounds.items() if count > place)
