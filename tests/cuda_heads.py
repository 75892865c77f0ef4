"""Draft heads on a CUDA device in bf16, against the same heads in fp32 on the CPU, and an engine that drafts with them.

PYTHONPATH=src:tests python tests/cuda_heads.py [device]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.backends.base import Spans
from outrider.backends.eagle_head import EagleHead
from outrider.backends.head_base import Entries
from outrider.backends.medusa_head import MedusaHead
from outrider.backends.transformer import TransformerBackend
from outrider.draft.eagle import EagleDrafter
from outrider.draft.medusa import MedusaDrafter
from outrider.engine.engine import Engine
from outrider.kv.pages import Pages
from outrider.models.heads import open_head
from outrider.models.opening import open_model

from tiny_heads import EAGLE, EAGLE3, MEDUSA, save_head

TOKENS = [(37 * place) % 1000 for place in range(40)]


def model() -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 7}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))


def rows(layout: str, folder: Path, device: str) -> torch.Tensor:
    """What a head says after a text, and after a small tree of guesses."""
    target = TransformerBackend(open_model(folder / "target"), Pages(64, 16), device=device)
    file = open_head(folder / layout)
    head = MedusaHead(file, target) if layout in MEDUSA else EagleHead(file, target)
    slot, ids = target.open(TOKENS, 100), target.ops.integers(TOKENS)
    states = target.score(Spans([slot], [0], [len(TOKENS)], [1], ids), hidden=head.hidden).hidden
    features = [torch.as_tensor(states[layer]) for layer in head.hidden]
    if isinstance(head, MedusaHead):
        return head.rows(features[0], 3).flatten(0, 1).float().cpu()
    fused, count = head.fuse(features), len(TOKENS) - 1
    head.keep_edges(slot, 0, fused)
    outputs = head.read(Entries([slot], [0], [0], [count], TOKENS[1:], fused[:count]))
    tree = Entries([slot], [0], [count], [3], [1, 2, 3], head.again(outputs[-3:]), {0: [-1, -1, 0]})
    return head.rows(torch.cat([outputs, head.read(tree)])).float().cpu()


def answers(drafter: Any, target: TransformerBackend) -> None:
    engine = Engine.load(target, draft=drafter)
    for shape in ({"width": 4}, {"width": 12, "tree": True}):
        for accept in ("coupled", "rejection"):
            started = time.perf_counter()
            prompts = [TOKENS[:9], TOKENS[:30], TOKENS[:3]]
            results = engine.generate(prompts, max_tokens=40, temperature=0.8, seed=1, accept=accept, **shape)
            took = time.perf_counter() - started
            counted = engine.statistics
            print(f"{drafter.name} {shape} {accept}: {took:.2f} s, {counted.draft_steps} steps, {len(results)} answers")


def main(device: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, made = Path(name), model()
        made.save_pretrained(folder / "target")
        for layout in (*MEDUSA, *EAGLE, *EAGLE3):
            save_head(folder / layout, layout, made)
            wanted, given = (rows(layout, folder, one).nan_to_num(neginf=0.0) for one in ("cpu", device))
            error = float((wanted - given).abs().max() / wanted.abs().max())
            print(f"{layout}: {error:.4f}")
            assert error < 0.05, layout
        for load, layout in ((MedusaDrafter.load, "medusa"), (EagleDrafter.load, "eagle3")):
            target = TransformerBackend(open_model(folder / "target"), Pages(64, 16), device=device)
            answers(load(folder / layout, target), target)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
