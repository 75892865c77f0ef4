"""Drawing and judging on a CUDA device: verdicts beside the reference's, and the law. Needs what the tests need:

PYTHONPATH=src:tests python tests/cuda_rounds.py [device]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.backends.cuda.sampling import DeviceSampling
from outrider.types import Drafts, Scores
from rounds import REFERENCE, SETTINGS, Round

from cases import CONTROLS, Case, measure

LAW = [
    Case("plain", "none", 0),
    Case("chain, rejection", "model", 3, "rejection"),
    Case("chain, rejection, every control", "model", 3, "rejection", CONTROLS["together"]),
    Case("chain, coupled", "model", 3, "coupled"),
    Case("certain chain, rejection", "scripted", 5, "rejection", {"min_p": 0.3}),
    Case("tree, rejection", "model", 8, "rejection", tree=True),
    Case("tree, coupled", "model", 8, "coupled", tree=True),
    Case("certain tree, rejection", "trees", 8, "rejection", tree=True),
    Case("mixed tree, rejection", "mixed", 8, "rejection", {"temperature": 0.6}, tree=True),
    Case("mixed tree, coupled", "mixed", 8, "coupled", {"top_p": 0.7}, tree=True),
]


def verdicts(device: str, size: int, count: int) -> None:
    """An edge that a last digit moves may decide now and then; nothing else may."""
    ops, different = DeviceSampling(torch.device(device)), 0
    for seed in range(count):
        batch = Round(seed * 100 + size, size, SETTINGS if size > 2 else SETTINGS[:-1])
        probs = None if batch.probs is None else torch.tensor(batch.probs, device=device)
        drafts = Drafts(batch.counts, torch.tensor(batch.tokens, device=device), probs, batch.parents)
        logits = torch.tensor(np.ascontiguousarray(batch.logits), device=device)
        ours = batch.told(ops.judge(batch.jobs, drafts, Scores(batch.rows, logits)))
        different += ours != batch.told(batch.judge(REFERENCE))
    print(f"verdicts, vocabulary of {size}: {different} of {count} rounds differ from the reference", flush=True)
    assert different <= count // 50


def law(device: str, count: int) -> None:
    for case in LAW:
        started = time.perf_counter()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("outrider.backends.mock.SamplingOps", lambda xp, _: DeviceSampling(torch.device(device)))
            value = measure(replace(case, arrays="torch", draft_arrays="torch", device=device), count)
        print(f"law, {case.name}: p = {value:.3g} ({time.perf_counter() - started:.1f} s)", flush=True)
        assert value > 1e-4


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    for size, count in ((2, 200), (5, 300), (1000, 300), (49_157, 100), (128_256, 60)):
        verdicts(where, size, count)
    law(where, 3000)
