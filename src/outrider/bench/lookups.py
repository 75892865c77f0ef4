"""What looking text up costs: proposals with 8,000 tokens of context and 1,000,000 of past text, indexing, memory.

The text is made of phrases that come again and again, with noise between them, so that there is something to find.
Times are of the processor: what else a machine does at the same time would otherwise show in the 99th percentile.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from outrider.config import SuffixConfig
from outrider.draft.certain import LookupDrafter
from outrider.draft.ngram import NgramDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.types import Batch, Job, Request, SamplingParams, Scores, Verdicts

CONTEXT = 8_000
PAST = 1_000_000
VOCAB = 50_000
NEW = 3  # tokens a round emits


@dataclass(frozen=True, slots=True)
class Reading:
    """Median, 99th percentile and range."""

    name: str
    median: float
    p99: float
    low: float
    high: float
    unit: str


def readings(*, quick: bool = False) -> Iterator[Reading]:
    """Microseconds per round and per indexed token, then megabytes."""
    past, rounds = (PAST // 10, 200) if quick else (PAST, 2_000)
    rng = np.random.default_rng(0)
    phrases = _phrases(rng)
    ngram, suffix = NgramDrafter(), SuffixDrafter(SuffixConfig(max_tokens=past + 2 * CONTEXT))
    drafters: tuple[tuple[LookupDrafter, int], ...] = ((ngram, 20), (suffix, past // CONTEXT))
    for drafter, num_texts in drafters:
        indexing: list[float] = []
        for _ in range(num_texts):
            job = _job(_text(rng, phrases, CONTEXT))
            indexing.append(_read(drafter, job) / CONTEXT)
            drafter.forget(job)
        yield _reading(f"{drafter.name}: index a text, per token", indexing)
        for width, tree in ((8, False), (16, False), (16, True)):
            job = _job(_text(rng, phrases, CONTEXT))
            _read(drafter, job)
            proposing, observing = _rounds(drafter, job, _text(rng, phrases, rounds * NEW), width, tree)
            yield _reading(f"{drafter.name}: propose a {'tree' if tree else 'chain'} of {width}", proposing)
            drafter.forget(job)
        yield _reading(f"{drafter.name}: index the {NEW} tokens of a round", observing)
    yield _megabytes(f"suffix: memory with {past:,} tokens", suffix.past.num_bytes)
    yield _megabytes(f"ngram: memory of a job with {CONTEXT:,} tokens", _ngram_bytes(_text(rng, phrases, CONTEXT)))


def _phrases(rng: np.random.Generator) -> list[list[int]]:
    """5,000 phrases of 3 to 40 tokens; frequent tokens are in many."""
    return [_tokens(rng, int(length)) for length in rng.integers(3, 41, 5_000)]


def _text(rng: np.random.Generator, phrases: Sequence[list[int]], length: int) -> list[int]:
    text: list[int] = []
    while len(text) < length:
        text += phrases[min(int(rng.zipf(1.3)), len(phrases)) - 1]
        text += _tokens(rng, int(rng.integers(0, 6)))
    return text[:length]


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) % VOCAB for token in rng.zipf(1.2, count)]


def _job(tokens: list[int]) -> Job:
    request = Request(prompt=tokens)
    return Job(
        request=request,
        request_id="",
        params=SamplingParams(),
        tokens=tokens,
        num_prompt=len(tokens),
        seed=0,
        rule="rejection",
        words=(0, 0),
        limit=len(tokens),
        stop_ids=frozenset(),
        arrival=0.0,
        drafters=("ngram", "suffix"),
    )


def _read(drafter: LookupDrafter, job: Job) -> float:
    """Microseconds to index a whole text, in portions as it comes."""
    batch = Batch([job], [0], [], [])
    started = time.thread_time()
    while job.id not in drafter.lookups or drafter.lookups[job.id].missing(job.tokens):
        drafter.observe(batch, Scores([], None), Verdicts(None, None))
    return (time.thread_time() - started) * 1e6


def _rounds(
    drafter: LookupDrafter, job: Job, text: list[int], width: int, tree: bool
) -> tuple[list[float], list[float]]:
    """Microseconds of every `propose` and `observe` while the job goes on with `text`."""
    batch = Batch([], [], [job], [0])
    proposing, observing = [], []
    for start in range(0, len(text), NEW):
        before = time.thread_time()
        drafter.propose([job], [width], [tree])
        between = time.thread_time()
        job.tokens += text[start : start + NEW]
        drafter.observe(batch, Scores([], None), Verdicts(None, None))
        proposing.append((between - before) * 1e6)
        observing.append((time.thread_time() - between) * 1e6)
    return proposing, observing


def _ngram_bytes(text: list[int]) -> int:
    drafter, job = NgramDrafter(), _job(text)
    tracemalloc.start()
    _read(drafter, job)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def _reading(name: str, values: Sequence[float], unit: str = "us") -> Reading:
    return Reading(name, median(values), float(np.quantile(values, 0.99)), min(values), max(values), unit)


def _megabytes(name: str, size: int) -> Reading:
    return _reading(name, [size / 1e6], "MB")
