"""Is the engine's own choice of width as good as the best fixed one? Plain, `auto` and fixed widths take turns.

Every width has an engine of its own in one process, with the same model and drafters. They answer each prompt at the
same time and by short turns, so that a slow moment of the machine hits all alike. Ratios are of
seconds a token, by kind of work and for all; answers are greedy.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice

from outrider.bench.work import Work
from outrider.engine.engine import Engine

FIXED = (1, 2, 3, 5)
TURN_S = 0.02  # a few rounds: a slow moment of the machine lasts longer, and hits all alike
WARM = "Tell me about the weather in a place that you know."


@dataclass(slots=True)
class Reading:
    """Seconds and tokens of one kind of work, by width: 0 is plain, None is `auto`."""

    kind: str
    seconds: dict[int | None, float] = field(default_factory=dict)
    tokens: dict[int | None, int] = field(default_factory=dict)
    differing: int = 0  # answers that are not those of plain decoding

    def speed(self, width: int | None) -> float:
        """Times the speed of plain decoding."""
        plain = self.seconds[0] / self.tokens[0]
        return plain / (self.seconds[width] / self.tokens[width])

    @property
    def best_width(self) -> int:
        return max((width for width in self.seconds if width is not None), key=self.speed)

    @property
    def of_best(self) -> float:
        return self.speed(None) / self.speed(self.best_width)

    def add(self, width: int | None, seconds: float, tokens: int) -> None:
        self.seconds[width] = self.seconds.get(width, 0.0) + seconds
        self.tokens[width] = self.tokens.get(width, 0) + tokens


def readings(
    model: str, draft: str, work: Work, *, limit: int, max_tokens: int, mixed: bool = False, threads: int | None = None
) -> Iterator[Reading]:
    """Kind by kind; mixed: all kinds shuffled, as engines that live on see them."""
    widths: tuple[int | None, ...] = (0, None, *FIXED)
    with ExitStack() as stack:
        engines = {
            width: stack.enter_context(Engine.load(model, draft=draft, width=width, threads=threads, threaded=False))
            for width in widths
        }
        _answers(engines, WARM, max_tokens)
        if mixed:
            everything = [prompt for prompts in work.values() for prompt in islice(prompts, limit)]
            random.Random(0).shuffle(everything)
            yield _reading("mixed", everything, engines, max_tokens)
            return
        whole = Reading("all")
        for kind, prompts in work.items():
            reading = _reading(kind, list(islice(prompts, limit)), engines, max_tokens)
            whole.differing += reading.differing
            for width in widths:
                whole.add(width, reading.seconds[width], reading.tokens[width])
            yield reading
        yield whole


def _reading(kind: str, prompts: Sequence[str], engines: dict[int | None, Engine], max_tokens: int) -> Reading:
    reading, widths = Reading(kind), list(engines)
    for number, prompt in enumerate(prompts):
        turn = number % len(widths)
        answers = _answers({width: engines[width] for width in [*widths[turn:], *widths[:turn]]}, prompt, max_tokens)
        for width, (seconds, tokens) in answers.items():
            reading.add(width, seconds, len(tokens))
            reading.differing += tokens != answers[0][1]
    return reading


def _answers(
    engines: dict[int | None, Engine], prompt: str, max_tokens: int
) -> dict[int | None, tuple[float, list[int]]]:
    """Seconds and tokens of each engine's answer; they take turns until all have ended."""
    seconds, streams = dict.fromkeys(engines, 0.0), {}
    for width, engine in engines.items():
        tokens = engine.encode_chat([{"role": "user", "content": prompt}])
        streams[width] = engine.stream(tokens, max_tokens=max_tokens, temperature=0.0)
    while running := [width for width, stream in streams.items() if not stream.is_over]:
        for width in running:
            started = now = time.perf_counter()
            while now - started < TURN_S and not streams[width].is_over:
                engines[width].step()
                now = time.perf_counter()
            seconds[width] += now - started
    return {width: (seconds[width], stream.tokens) for width, stream in streams.items()}
