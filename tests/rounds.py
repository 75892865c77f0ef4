"""Random rounds to be judged, for every implementation of sampling beside the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.backends.base import ModelInfo
from outrider.config import SpeculationConfig
from outrider.engine.intake import Intake
from outrider.sampling.ops import SamplingOps
from outrider.types import Drafts, Job, Request, SamplingParams, Scores, Verdicts

REFERENCE = SamplingOps(np)
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 5},
    {"top_k": 300, "temperature": 0.7},
    {"top_k": 3000, "top_p": 0.99, "temperature": 50.0},
    {"top_p": 0.5, "temperature": 1.5},
    {"top_p": 0.999},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"typical_p": 0.7},
    {"logit_bias": {1: 5.0}, "banned": (0,), "repetition_penalty": 1.4},
]


def job(vocab: int, prompt: Sequence[int] = (1, 0), output: Sequence[int] = (), **settings: Any) -> Job:
    info = ModelInfo(name="test", vocab_size=vocab, num_columns=vocab, context=1000)
    intake = Intake(info, None, ("none", "model"), "model", SpeculationConfig(width=4))
    made = intake.job(Request(prompt=list(prompt), sampling=SamplingParams(**settings)), "test", 0.0)
    for token in output:
        made.tokens.append(token)
        if made.counts is not None:
            made.counts[token] = made.counts.get(token, 0) + 1
    return made


def softmax(x: Any) -> Any:
    mass = np.exp(x - x.max(axis=-1, keepdims=True))
    return (mass / mass.sum(axis=-1, keepdims=True)).astype(np.float32)


class Round:
    """A random batch: chains with and without a bonus row, trees, certain and sampled drafts, odd rows."""

    def __init__(self, seed: int, size: int, settings: Sequence[dict[str, Any]] = SETTINGS) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.jobs: list[Job] = []
        self.counts: list[int] = []
        self.rows: list[int] = []
        self.parents: dict[int, list[int]] = {}
        for index in range(int(rng.integers(1, 4))):
            rule, chosen = str(rng.choice(["rejection", "coupled"])), settings[rng.integers(len(settings))]
            prompt = [int(rng.integers(0, size))] * int(rng.integers(1, 9))
            self.jobs.append(job(size, prompt, seed=seed + index, accept=rule, **chosen))
            count = int(rng.integers(0, 6))
            if count and rng.random() < 0.5:
                self.parents[index] = [int(rng.integers(-1, node)) for node in range(count)]
            has_bonus = count == 0 or index in self.parents or rng.random() < 0.8
            self.counts.append(count)
            self.rows.append(count + has_bonus)
        self.logits = self._logits(sum(self.rows), size)
        self.tokens = np.asarray(self._tokens(), dtype=np.int64)
        self.probs = None
        if len(self.tokens) and rng.random() < 0.5:
            self.probs = softmax(rng.standard_normal((len(self.tokens), size)) * 2)

    def _logits(self, rows: int, size: int) -> Any:
        rng = self.rng
        x = (rng.standard_normal((rows, size)) * rng.choice([0.0, 0.01, 1.0, 3.0, 8.0])).astype(np.float32)
        if rng.random() < 0.2:
            x = np.round(x)  # ties
        if rng.random() < 0.2:
            x[:, rng.random(size) < 0.7] = -np.inf
        if rng.random() < 0.15:
            x[rng.integers(rows)] = rng.choice([np.nan, np.inf, -np.inf])
        if rng.random() < 0.1:
            x[rng.integers(rows), rng.integers(size)] = np.nan
        return np.asfortranarray(x) if rng.random() < 0.2 else x

    def _tokens(self) -> list[int]:
        """Drafts that are kept often: mostly drawn from the row that judges them."""
        tokens, first = [], 0
        for index, count in enumerate(self.counts):
            for parent in self.parents.get(index, range(-1, count - 1)):
                row = np.nan_to_num(self.logits[first + parent + 1], nan=0.0, posinf=9.0, neginf=-99.0)
                noise = self.rng.gumbel(size=len(row)) * self.rng.choice([1.0, 1.0, 100.0])
                tokens.append(int(np.argmax(row + noise)))
            first += self.rows[index]
        return tokens

    def judge(self, ops: SamplingOps) -> Verdicts:
        drafts = Drafts(self.counts, self.tokens, self.probs, self.parents)
        with np.errstate(invalid="ignore"):  # a ban of what is infinite already
            return ops.judge(self.jobs, drafts, Scores(self.rows, self.logits))

    def told(self, verdicts: Verdicts) -> list[Any]:
        """What a caller may look at: nothing else of a job that failed, no token where there was no row for it."""
        told: list[Any] = []
        for index, (count, rows) in enumerate(zip(self.counts, self.rows, strict=True)):
            if index in verdicts.faults:
                told.append("a fault")  # of several unusable rows native code names the first
                continue
            kept = list(verdicts.kept(index))
            has_next = len(kept) < count or rows > count
            told.append((int(verdicts.accepted[index]), kept, int(verdicts.next[index]) if has_next else None))
        return told
