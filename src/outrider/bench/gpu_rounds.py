"""Speculation on a GPU: what a draft of a shape brings at a given acceptance, alone and under load.

The target counts, so a synthetic draft can be right as often as it is told (`draft.synthetic`), and random weights
will do. What is measured is beside what the costs of passes and draft steps, measured apart, let expect:

    tokens of a round / (pass of k + 1 rows + k draft steps), for the best k
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from outrider.backends.cuda import novelty
from outrider.bench.gpu import Line, median
from outrider.draft.synthetic import SyntheticDrafter
from outrider.engine.engine import Engine
from outrider.models.random_file import PREFIX
from outrider.types import Request

SHARES = (0.6, 0.8, 0.9)
BATCHES = (1, 8, 32, 64, 128, 256)
MOST = 10  # widths that are looked at
CONTEXT = 64  # tokens of a prompt
REQUESTS = {True: (192, 3), False: (384, 6)}  # quick or not: tokens of an answer, and how many answers
BATCHED = 160  # tokens of an answer, where many are given at once
BEGINNING = 16  # tokens that each has before rounds are looked at: until then prompts are read
PREFILL = 4096  # tokens of prompts in a pass: all begin soon after one another
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
        return Run._make(mine - theirs for mine, theirs in zip(self, other, strict=True))

    @property
    def round_s(self) -> float:
        return self.seconds / self.rounds

    @property
    def host_s(self) -> float:
        """Of a round: what is not spent waiting for the device."""
        return (self.seconds - self.waited_s) / self.rounds


def load(shape: str, draft: str, device: str, batch: int, length: int) -> Engine:
    gc.collect()
    gc.freeze()  # a look at all of torch's objects takes longer than ten rounds
    room = batch * (CONTEXT + length + 64)
    return Engine.load(
        f"{PREFIX}{shape}:counting",
        draft=f"synthetic:{draft}@0.8",
        device=device,
        cache_tokens=max(room, 4096),
        max_batch=batch,
        prefill_chunk=PREFILL,
        max_width=MOST,
        threaded=False,
    )


def drafter_of(engine: Engine) -> SyntheticDrafter:
    drafter = engine.loop.router.drafters["synthetic"]
    assert isinstance(drafter, SyntheticDrafter), "it was loaded with one"
    return drafter


class Answered(NamedTuple):
    """`together`: the part in which all requests were under way, with `BEGINNING` tokens or more."""

    whole: Run
    together: Run


def answer(engine: Engine, batch: int, length: int, width: int | None) -> Answered:
    """As many requests at once. No prompt comes twice: nothing of it is known."""
    random, size = np.random.default_rng(next(_seeds)), engine.info.vocab_size
    prompts = [random.integers(0, size, CONTEXT).tolist() for _ in range(batch)]
    settings = {"width": width, "max_tokens": length, "temperature": 0.0, "ignore_eos": True}
    engine.reset_statistics()
    begun = last = first = _count(engine)
    streams = engine.open_streams([Request.of(prompt, settings) for prompt in prompts])
    is_beginning = True
    while engine.num_requests:
        engine.step()
        if is_beginning:
            is_beginning = any(len(stream.tokens) < BEGINNING for stream in streams)
            first = last = _count(engine)
        elif engine.num_requests == batch:
            last = _count(engine)
    done = _count(engine)
    for prompt, stream in zip(prompts, streams, strict=True):
        if stream.error is not None:
            raise stream.error
        wanted = [(prompt[-1] + 1 + place) % size for place in range(length)]
        assert stream.tokens == wanted, f"a model that counts said {stream.tokens} after {prompt[-1]}"
    return Answered(done.less(begun), last.less(first))


def _count(engine: Engine) -> Run:
    """All there was so far."""
    ops: Any = engine.loop.target.ops
    seen, waited_s = engine.statistics, getattr(ops, "waited_s", 0.0)
    judged = seen.accepted + seen.rejected
    return Run(seen.tokens, time.perf_counter(), seen.passes, seen.drafted, seen.accepted, judged, waited_s)


def warm_up(engine: Engine, batch: int, length: int, width: int | None) -> None:
    """Until a run needs nothing that has to be built, and the engine has learned what it can."""
    for number in range(TRIES):
        built = novelty.count()
        answer(engine, batch, length, width)
        if number > 0 and novelty.count() == built:
            return


def costs(engine: Engine, batch: int, widths: int) -> Costs:
    """Of passes and of drafting, each queued behind itself: what the device alone needs."""
    target: Any = engine.loop.target
    draft: Any = drafter_of(engine).backend
    passes = [target.pass_s(batch, rows, CONTEXT) for rows in range(1, widths + 2)]
    return Costs(passes, [draft.roll_s(batch, steps, CONTEXT) for steps in range(1, widths + 1)])


def rounds(shape: str, draft: str, device: str, quick: bool) -> Iterator[Line]:
    """One request at a time, at each acceptance: the engine's own width and the best one, beside what costs allow."""
    length, repeats = REQUESTS[quick]
    engine = load(shape, draft, device, 1, length)
    found = costs(engine, 1, MOST)
    yield Line(f"{shape}: pass of 1 row", found.passes[0] * 1e3, "ms")
    share_of = (found.steps[-1] - found.steps[0]) / (MOST - 1) / found.passes[0]
    yield Line(f"{draft}: draft step", share_of * found.passes[0] * 1e3, "ms", note=f"{share_of:.3f} of that pass")
    warm_up(engine, 1, length, 0)
    plain = [answer(engine, 1, length, 0).whole.rate for _ in range(repeats)]
    yield _rates("plain", plain, "")
    for share in SHARES:
        width, expected = found.best(share)
        drafter_of(engine).be_right(share)
        for name, asked in (("", None), (f", width {width}", width)):
            warm_up(engine, 1, length, asked)
            runs = [answer(engine, 1, length, asked).whole for _ in range(repeats)]
            ratio = median([run.rate for run in runs]) / median(plain)
            drafted = sum(run.drafted for run in runs) / sum(run.rounds for run in runs)
            kept = sum(run.accepted for run in runs) / max(1, sum(run.judged for run in runs))
            note = f"{ratio:.2f}x plain; {drafted:.1f} drafted a round, {kept:.2f} kept; "
            note += f"costs let expect {expected:.2f}x at width {width}: {ratio / expected:.2f} of it"
            yield _rates(f"{share:.0%} right{name}", [run.rate for run in runs], note)
    engine.close()


def batches(shape: str, draft: str, device: str, quick: bool, sizes: Sequence[int] = BATCHES) -> Iterator[Line]:
    """Many requests at once: plain, and with the width left to the engine. Rounds are looked at while all of them are
    under way; whole answers, their prompts and the last ones' ends counted in, are compared beside that."""
    repeats = 3 if quick else 5
    engine = load(shape, draft, device, max(sizes), BATCHED)
    for batch in sizes:
        found = costs(engine, batch, min(4, max(1, 512 // batch - 1)))
        warm_up(engine, batch, BATCHED, 0)
        plain = [answer(engine, batch, BATCHED, 0) for _ in range(repeats)]
        yield _rounds(f"{batch} at once, plain", plain, f"the device alone needs {found.passes[0] * 1e3:.2f} ms")
        for share in SHARES[1:2] if quick else SHARES[:2]:
            drafter_of(engine).be_right(share)
            width, expected = found.best(share)
            warm_up(engine, batch, BATCHED, None)
            runs = [answer(engine, batch, BATCHED, None) for _ in range(repeats)]
            ratio, whole = (
                median([run[part].rate for run in runs]) / median([run[part].rate for run in plain]) for part in (1, 0)
            )
            drafted = sum(run.together.drafted for run in runs) / sum(run.together.rounds for run in runs) / batch
            note = f"{ratio:.2f}x plain; {drafted:.1f} drafted for each; costs let expect {expected:.2f}x at width "
            yield _rounds(
                f"{batch} at once, {share:.0%} right", runs, f"{note}{width}; whole answers {whole:.2f}x plain"
            )
    engine.close()


def _rounds(name: str, runs: Sequence[Answered], note: str) -> Line:
    together = [run.together for run in runs]
    round_s, host_s = median([run.round_s for run in together]), median([run.host_s for run in together])
    note += f"; a round takes {round_s * 1e3:.2f} ms, the host works {host_s * 1e3:.2f} meanwhile"
    return _rates(name, [run.rate for run in together], note)


def _rates(name: str, rates: Sequence[float], note: str) -> Line:
    return Line(name, median(rates), "tokens/s", min(rates), max(rates), note)
