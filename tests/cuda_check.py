"""Sampling and engine on a CUDA device against numpy. Needs torch with CUDA, numpy and array-api-compat, nothing else:

PYTHONPATH=src python tests/cuda_check.py [device]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import array_api_compat.torch as torch_xp
import numpy as np
import torch

from outrider.backends.mock import MockBackend
from outrider.config import MockConfig
from outrider.engine.engine import Engine
from outrider.sampling.noise import Noise, Stream, seed_words
from outrider.types import Request, SamplingParams

CONTROLS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 3, "min_p": 0.05},
    {"typical_p": 0.7},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"logit_bias": {1: 1.0}, "banned": (0,)},
]


def noise_is_equal(device: str) -> None:
    """The same 32-bit integers, for every stream and a real vocabulary."""
    words = np.asarray([seed_words(seed, seed % 3) for seed in range(64)], dtype=np.int32).T.copy()
    positions = np.arange(64, dtype=np.int32) * 37
    there_words, there_positions = (torch.asarray(a, device=device) for a in (words, positions))
    for stream in Stream:
        here = Noise(np).bits(words, positions, stream, 49_152)
        there = Noise(torch_xp, device).bits(there_words, there_positions, stream, 49_152)
        assert (there.cpu().numpy() == here).all(), stream
        floats = np.abs(Noise(np).gumbel(here) - Noise(torch_xp, device).gumbel(there).cpu().numpy())
        assert floats.max() < 1e-5, floats.max()
    print("noise: the same integers; Gumbel floats differ by at most", floats.max())


def engines_agree(device: str) -> None:
    """Mixed batches of every control, both rules, several widths: the tokens of the numpy engine."""
    config = MockConfig(vocab_size=12, seed=4)
    draft = replace(config, drift=0.8)
    requests = [
        Request(
            prompt=[1, 2, 3],
            sampling=SamplingParams(seed=seed, accept=rule, **controls),
            max_tokens=24,
            width=seed % 6,
        )
        for seed in range(12)
        for rule in ("coupled", "rejection")
        for controls in CONTROLS
    ]
    here = Engine.load(MockBackend(config), draft=MockBackend(draft), max_batch=200).generate(requests)
    engine = Engine.load(
        MockBackend(config, arrays="torch", device=device),
        draft=MockBackend(draft, arrays="torch", device=device),
        max_batch=200,
    )
    there = engine.generate(requests)
    different = sum(a.token_ids != b.token_ids for a, b in zip(here, there, strict=True))
    assert different <= len(requests) // 50, different  # an ulp may move the edge of a top-p now and then
    print(f"engine: {len(requests) - different} of {len(requests)} answers token-identical to numpy")
    plain = engine.generate([replace(r, width=0) for r in requests])
    for request, wide, narrow in zip(requests, there, plain, strict=True):
        if request.sampling.rule == "coupled" or request.sampling.temperature == 0.0:
            assert wide.token_ids == narrow.token_ids, request
    print("engine: coupled and greedy answers equal plain decoding on the device")


def judge_time(device: str) -> None:
    """Engine time of a wide round at a real vocabulary, for the record."""
    config = MockConfig(vocab_size=50_000, seed=4, num_contexts=61)
    for batch in (1, 64):
        engine = Engine.load(
            MockBackend(config, arrays="torch", device=device),
            draft=MockBackend(replace(config, drift=0.3), arrays="torch", device=device),
            max_batch=batch,
        )
        for rule in ("coupled", "rejection"):
            for width in (0, 4):
                times = []
                for _ in range(4):
                    engine.reset_statistics()
                    started = time.perf_counter()
                    engine.generate([[1]] * batch, max_tokens=40, width=width, seed=1, accept=rule)
                    times.append(time.perf_counter() - started)
                per_round = engine.statistics.judge_s / engine.statistics.passes * 1e6
                per_token = min(times[1:]) / (40 * batch) * 1e6
                print(f"{rule}, k={width}, batch {batch}: judge {per_round:.0f} us a round, {per_token:.0f} us a token")


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    noise_is_equal(where)
    engines_agree(where)
    judge_time(where)
