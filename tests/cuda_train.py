"""A training run that is broken off and gone on with, on a CUDA device, against one that was not.

On a GPU even two whole runs differ, so a resumed one may differ as much: that is what is checked.

PYTHONPATH=src:tests python tests/cuda_train.py MODEL PROMPTS.jsonl [device] [updates] [num_prompts]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from torch import Tensor

from outrider.engine.engine import Engine
from outrider.train.eagle import EagleTrainer
from outrider.train.run import gather
from outrider.train.settings import TrainSettings
from outrider.train.texts import SCHEDULING, Texts


def trained(engine: Engine, texts: Texts, settings: TrainSettings, *until: int | None) -> dict[str, Tensor]:
    """The weights after a run in parts, each begun anew from what the one before it saved."""
    with tempfile.TemporaryDirectory() as folder:
        for last in until:
            trainer = EagleTrainer(engine, texts, settings, Path(folder))
            print(f"from update {trainer.update}", flush=True)
            trainer.run(
                lambda report: print(f"  update {report.update}: loss {report.loss:.4f}", flush=True), until=last
            )
        return {name: weight.detach().double().cpu() for name, weight in trainer.net.state_dict().items()}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """As a share of the norm."""
    square = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return float((square / sum(float(weight.square().sum()) for weight in one.values())) ** 0.5)


def main(model: str, prompts: str, device: str = "cuda", updates: str = "20", num_prompts: str = "256") -> None:
    count = int(updates)
    settings = TrainSettings(
        model=model, prompts=(prompts,), num_prompts=int(num_prompts), held_out=16, max_tokens=128, updates=count
    )
    loading = {"draft": "none", "device": device, "backend": "torch", "scheduling": SCHEDULING}
    with Engine.load(model, cache_tokens=128 * 768, **loading) as engine, tempfile.TemporaryDirectory() as folder:
        texts = gather(engine, settings, Path(folder), print)
        whole, again = trained(engine, texts, settings, None), trained(engine, texts, settings, None)
        resumed = trained(engine, texts, settings, count // 2, None)
    usual, found = apart(whole, again), [apart(one, resumed) for one in (whole, again)]
    print(f"two whole runs of {count} updates differ by {usual:.2e} of their norm")
    print(f"one resumed after {count // 2} differs by {found[0]:.2e} from the first, by {found[1]:.2e} from the second")
    assert max(found) <= 2.0 * usual, "resuming changes more than chance does"


if __name__ == "__main__":
    main(*sys.argv[1:])
