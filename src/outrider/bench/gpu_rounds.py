"""Speculation on a GPU: what a draft of a shape brings at a given acceptance, alone and under load.

The target counts, so a synthetic draft can be right as often as it is told (`draft.synthetic`), and random weights
will do. What is measured is beside what the costs of passes and draft steps, measured apart, let expect:

    tokens of a round / (pass of k + 1 rows + k draft steps), for the best k
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from outrider.backends.base import Spans
from outrider.backends.cuda import novelty
from outrider.backends.cuda.backend import GpuBackend
from outrider.bench.gpu import Line, median, timed
from outrider.draft.synthetic import SyntheticDrafter
from outrider.engine.engine import Engine
from outrider.models.random_file import PREFIX
from outrider.types import SamplingParams, Slot

SHARES = (0.6, 0.8, 0.9)
BATCHES = (1, 8, 32, 64, 128, 256)
MOST = 10  # widths that are looked at
CONTEXT = 64  # tokens of a prompt
REQUESTS = {True: (192, 3), False: (384, 6)}  # quick or not: tokens of an answer, and how many answers
BATCHED = 128  # tokens of an answer, where many are given at once
BEGINNING = 16  # of those that are not counted where rounds are looked at: prompts are read meanwhile
TRIES = 8  # runs, until one needs nothing that has to be built


_seeds = itertools.count()


class Costs(NamedTuple):
    """Seconds on the device, of one batch."""

    passes: list[float]  # of a target pass with 1 row for each request, 2 rows, ...
    steps: list[float]  # of drafting 1 token for each, 2 tokens, ...

    def best(self, share: float) -> tuple[int, float]:
        """The width that brings most, and how many times plain it would be if nothing else took time."""
        ratios = [
            sum(share**place for place in range(width + 1)) * self.passes[0] / (self.passes[width] + step)
            for width, step in enumerate([0.0, *self.steps])
        ]
        width = max(range(len(ratios)), key=ratios.__getitem__)
        return width, ratios[width]


class Run(NamedTuple):
    """Some requests, answered together."""

    tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    judged: int
    waited_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def less(self, other: Run) -> Run:
        """What came after the other one, which was as long as the beginning of this."""
        return Run._make(mine - theirs for mine, theirs in zip(self, other, strict=True))

    @property
    def round_s(self) -> float:
        return self.seconds / self.rounds

    @property
    def host_s(self) -> float:
        """Of a round: what is not spent waiting for the device."""
        return (self.seconds - self.waited_s) / self.rounds


def load(shape: str, draft: str, device: str, batch: int, length: int, run_ahead: Any = False) -> Engine:
    room = batch * (CONTEXT + length + 64)
    return Engine.load(
        f"{PREFIX}{shape}:counting",
        draft=f"synthetic:{draft}@0.8",
        device=device,
        cache_tokens=max(room, 4096),
        max_batch=batch,
        max_width=MOST,
        run_ahead=run_ahead,
    )


def drafter_of(engine: Engine) -> SyntheticDrafter:
    drafter = engine.loop.router.drafters["synthetic"]
    assert isinstance(drafter, SyntheticDrafter), "it was loaded with one"
    return drafter


def answer(engine: Engine, batch: int, length: int, width: int | None) -> Run:
    """As many requests at once. No prompt comes twice: nothing of it is known."""
    random, size = np.random.default_rng(next(_seeds)), engine.info.vocab_size
    prompts = [random.integers(0, size, CONTEXT).tolist() for _ in range(batch)]
    engine.reset_statistics()
    ops: Any = engine.loop.target.ops
    waited, started = getattr(ops, "waited_s", 0.0), time.perf_counter()
    results = engine.generate(prompts, width=width, max_tokens=length, temperature=0.0, ignore_eos=True)
    seconds = time.perf_counter() - started
    for prompt, result in zip(prompts, results, strict=True):
        wanted = [(prompt[-1] + 1 + place) % size for place in range(length)]
        assert result.token_ids == wanted, "a model that counts was wrong"
    seen = engine.statistics
    return Run(
        batch * length,
        seconds,
        seen.passes,
        seen.drafted,
        seen.accepted,
        seen.accepted + seen.rejected,
        getattr(ops, "waited_s", 0.0) - waited,
    )


def warm_up(engine: Engine, batch: int, length: int, width: int | None) -> None:
    """Until a run needs nothing that has to be built, and the engine has learned what it can."""
    for number in range(TRIES):
        built = novelty.count()
        answer(engine, batch, length, width)
        if number > 0 and novelty.count() == built:
            return


def costs(engine: Engine, batch: int, widths: int, repeats: int) -> Costs:
    """Of passes and of drafting, each queued behind itself: what the device alone needs."""
    target: Any = engine.loop.target
    draft: Any = drafter_of(engine).backend
    slots = [target.open((), CONTEXT + MOST + 8) for _ in range(batch)]
    for slot in slots:
        for model in (target, draft):
            tokens = np.arange(CONTEXT)
            model.score(Spans([slot], [0], [CONTEXT], [0], tokens))
    passes = [median(timed(partial(_pass, target, slots, rows), repeats)) for rows in range(1, widths + 2)]
    steps = [median(timed(partial(_roll, draft, slots, steps), repeats)) for steps in range(1, widths + 1)]
    for slot in slots:
        target.close(slot)
    return Costs(passes, steps)


def _pass(target: GpuBackend, slots: Sequence[Slot], rows: int) -> None:
    count = len(slots)
    target.score(Spans(list(slots), [CONTEXT] * count, [rows] * count, [rows] * count, np.arange(rows * count)))
    for slot in slots:
        target.rewind(slot, CONTEXT)


def _roll(draft: GpuBackend, slots: Sequence[Slot], steps: int) -> None:
    """One token each is read, as in a round."""
    count = len(slots)
    drawing: Any = draft.ops.drawing([_Plain(slot) for slot in slots], steps)  # type: ignore[misc]
    spans = Spans(list(slots), [CONTEXT] * count, [1] * count, [1] * count, np.arange(count))
    assert draft.roll(spans, steps, drawing), "chains of a greedy request can be rolled"
    for slot in slots:
        draft.rewind(slot, CONTEXT)


class _Plain:
    """As much of a greedy job as drawing its drafts needs."""

    rule, words, grammar, min_length, tokens = "coupled", (0, 0), None, 0, (0,) * CONTEXT

    def __init__(self, number: int) -> None:
        self.id, self.params = -1 - number, SamplingParams(temperature=0.0)


def rounds(shape: str, draft: str, device: str, quick: bool) -> Iterator[Line]:
    """One request at a time, at each acceptance: the engine's own width beside what costs let expect, and run-ahead."""
    length, repeats = REQUESTS[quick]
    engine = load(shape, draft, device, 1, length)
    found = costs(engine, 1, MOST, 10 if quick else 30)
    yield Line(f"{shape}: pass of 1 row", found.passes[0] * 1e3, "ms")
    share_of = (found.steps[-1] - found.steps[0]) / (MOST - 1) / found.passes[0]
    yield Line(f"{draft}: draft step", share_of * found.passes[0] * 1e3, "ms", note=f"{share_of:.3f} of that pass")
    warm_up(engine, 1, length, 0)
    plain = [answer(engine, 1, length, 0).rate for _ in range(repeats)]
    yield _rates("plain", plain, "")
    ahead, may_run_ahead = (load(shape, draft, device, 1, length, run_ahead) for run_ahead in ("always", True))
    for share in SHARES:
        width, expected = found.best(share)
        in_order: list[float] = []  # the synchronous one
        for order, one, asked in (
            ("", engine, None),
            (f", width {width}", engine, width),
            (f", width {width}, run-ahead", ahead, width),
            (", run-ahead where it pays", may_run_ahead, None),
        ):
            drafter_of(one).be_right(share)
            warm_up(one, 1, length, asked)
            runs = [answer(one, 1, length, asked) for _ in range(repeats)]
            ratio = median([run.rate for run in runs]) / median(plain)
            in_order.append(ratio)
            drafted = sum(run.drafted for run in runs) / sum(run.rounds for run in runs)
            kept = sum(run.accepted for run in runs) / max(1, sum(run.judged for run in runs))
            note = f"{ratio:.2f}x plain; {drafted:.1f} drafted a round, {kept:.2f} kept; "
            if one is engine:
                note += f"costs let expect {expected:.2f}x at width {width}: {ratio / expected:.2f} of it"
            else:
                note += f"{ratio / in_order[asked is not None]:.2f} of what it is without"
            yield _rates(f"{share:.0%} right{order}", [run.rate for run in runs], note)
    for one in (engine, ahead, may_run_ahead):
        one.close()


def batches(shape: str, draft: str, device: str, quick: bool, sizes: Sequence[int] = BATCHES) -> Iterator[Line]:
    """Many requests at once: plain, and with the width left to the engine. Rounds are looked at when all prompts are
    read; how much quicker whole answers are, their prompts counted in, is said beside that."""
    repeats = 2 if quick else 4
    engine = load(shape, draft, device, max(sizes), BATCHED)
    for batch in sizes:
        found = costs(engine, batch, min(4, max(1, 512 // batch - 1)), 5)
        warm_up(engine, batch, BEGINNING, 0)
        beginning = answer(engine, batch, BEGINNING, 0)
        plain = [answer(engine, batch, BATCHED, 0) for _ in range(repeats)]
        rounds = [run.less(beginning) for run in plain]
        device_s = found.passes[0]
        late_s = max(0.0, median([run.round_s for run in rounds]) - device_s)
        note = f"a round takes {(device_s + late_s) * 1e3:.2f} ms, the device alone {device_s * 1e3:.2f}; "
        note += f"the host works {median([run.host_s for run in rounds]) * 1e3:.2f}, mostly meanwhile"
        yield _rates(f"{batch} at once, plain", [run.rate for run in rounds], note)
        for share in SHARES[1:2] if quick else SHARES[:2]:
            drafter_of(engine).be_right(share)
            width, expected = found.best(share)
            warm_up(engine, batch, BATCHED, None)
            beginning = answer(engine, batch, BEGINNING, None)
            runs = [answer(engine, batch, BATCHED, None) for _ in range(repeats)]
            ratio = median([run.rate for run in runs]) / median([run.rate for run in plain])
            rounds = [run.less(beginning) for run in runs]
            drafted = sum(run.drafted for run in rounds) / sum(run.rounds for run in rounds) / batch
            round_s, host_s = median([run.round_s for run in rounds]), median([run.host_s for run in rounds])
            note = f"whole answers {ratio:.2f}x plain; {drafted:.1f} drafted for each; "
            note += f"costs let expect {expected:.2f}x at width {width}; "
            note += f"a round takes {round_s * 1e3:.2f} ms, the host works {host_s * 1e3:.2f} of it"
            yield _rates(f"{batch} at once, {share:.0%} right", [run.rate for run in rounds], note)
    engine.close()


def _rates(name: str, rates: Sequence[float], note: str) -> Line:
    return Line(name, median(rates), "tokens/s", min(rates), max(rates), note)
