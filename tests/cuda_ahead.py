"""Run-ahead, preemption and swap with real models on a CUDA device: the same answers as in order, with room for all.

PYTHONPATH=src:tests python tests/cuda_ahead.py [device]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from outrider.backends.transformer import TransformerBackend
from outrider.config import SchedulerConfig, SpeculationConfig
from outrider.draft.base import Drafter
from outrider.draft.model import ModelDrafter
from outrider.draft.run_ahead import Cores, RunAheadDrafter
from outrider.engine.engine import Engine
from outrider.kv.pages import Pages
from outrider.models.opening import open_model
from outrider.types import Request, SamplingParams


def save(folder: Path, layers: int, width: int) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 1000, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).save_pretrained(folder)


def requests() -> list[Request]:
    return [
        Request(
            prompt=[(7 * number + place) % 1000 for place in range(20 + 5 * number)],
            sampling=SamplingParams(seed=number, temperature=0.0 if number % 2 else 0.7),
            max_tokens=140,
            ignore_eos=True,
        )
        for number in range(6)
    ]


def run(
    folder: Path, device: str, run_ahead: bool, num_pages: int, preempt: str
) -> tuple[list[list[int]], float, Engine]:
    """The draft is the target again, so that most proposals are kept and much is drafted ahead."""
    pages = Pages(num_pages, 16)
    target = TransformerBackend(open_model(folder / "target"), pages, device=device)
    draft = TransformerBackend(open_model(folder / "target"), pages, device=device)
    drafter: Drafter = ModelDrafter(draft, shares_slots=True)
    if run_ahead:
        drafter = RunAheadDrafter(drafter, target.ops, always=True, cores=Cores(device))
    engine = Engine(
        target, [drafter], speculation=SpeculationConfig(width=4), scheduling=SchedulerConfig(preempt=preempt)
    )
    engine.generate(requests()[:1])
    started = time.perf_counter()
    answers = [result.token_ids for result in engine.generate(requests())]
    return answers, time.perf_counter() - started, engine


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder / "target", 8, 512)
        wanted, in_order_s, _ = run(folder, device, False, 256, "recompute")
        for title, run_ahead, num_pages, preempt in (
            ("run-ahead", True, 256, "recompute"),
            ("run-ahead, few pages, recompute", True, 40, "recompute"),
            ("in order, few pages, swap", False, 40, "swap"),
            ("run-ahead, few pages, swap", True, 40, "swap"),
        ):
            ours, seconds, engine = run(folder, device, run_ahead, num_pages, preempt)
            equal = sum(a == b for a, b in zip(ours, wanted, strict=True))
            drafter = engine.loop.router.drafters["model"]
            overlap = drafter.overlap if isinstance(drafter, RunAheadDrafter) else None
            print(f"{title}: {equal} of {len(wanted)} answers equal, {seconds:.2f} s (in order {in_order_s:.2f} s)")
            print(f"  {overlap}, {engine.statistics.preemptions} preemptions")
            engine.loop.target.pages.check()


main()
