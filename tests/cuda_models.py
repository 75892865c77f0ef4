"""The transformer backend on a CUDA device in bf16, against the same model in fp32 on the CPU. Needs torch with CUDA,
transformers, safetensors, numpy and array-api-compat:

PYTHONPATH=src:tests python tests/cuda_models.py [device]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from outrider.backends.base import Spans
from outrider.backends.transformer import TransformerBackend
from outrider.engine.engine import Engine
from outrider.kv.pages import Pages
from outrider.models.opening import open_model

TREE = [-1, 0, 0, 1, 3, 2]


def model(seed: int, **changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    config = transformers.Qwen3Config(**{**shape, "num_attention_heads": 8, "num_key_value_heads": 2, **changes})
    made = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(3.0)
    return made


def rows(backend: TransformerBackend, tokens: list[int]) -> np.ndarray:
    """A prompt in chunks, a batch with a fork, a tree, a rewind: every way rows can come."""
    seen = []
    slot = backend.open(tokens, 400)

    def feed(slots: list[int], fed: list[list[int]], parents: dict[int, list[int]] | None = None) -> None:
        counts = [len(part) for part in fed]
        flat = backend.ops.integers([token for part in fed for token in part])
        spans = Spans(slots, [backend.length(one) for one in slots], counts, counts, flat, parents or {})
        seen.append(torch.as_tensor(backend.score(spans).logits).float().cpu().numpy())

    feed([slot], [tokens[:70]])
    feed([slot], [tokens[70:71]])
    other = backend.fork(slot)
    feed([slot, other], [tokens[71:76], tokens[80:85]])
    feed([slot], [tokens[90:96]], {0: TREE})
    backend.keep([slot], [76 + 4], {slot: [76 + node for node in (0, 1, 3, 4)]})
    feed([slot], [tokens[76:80]])
    backend.rewind(other, 60)
    feed([other], [tokens[60:64]])
    backend.close(slot)
    backend.close(other)
    backend.pages.check()
    return np.concatenate(seen)


def main(device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder) / "target", Path(folder) / "draft"
        model(0).save_pretrained(target)
        model(0, num_hidden_layers=3).save_pretrained(draft)
        tokens = np.random.default_rng(0).integers(0, 1000, 120).tolist()
        here = rows(TransformerBackend(open_model(target), Pages(64, 16)), tokens)
        there = rows(TransformerBackend(open_model(target), Pages(64, 16), device=device), tokens)
        error = np.abs(here - there).max() / np.abs(here).max()
        print(f"{len(here)} rows on {device}: relative error {error:.2g}")
        assert error < 0.05, "bf16 has three digits"
        engine = Engine.load(target, draft=draft, width=3, device=device, cache_tokens=4000)
        plain = Engine.load(target, device=device, cache_tokens=4000)
        started = time.perf_counter()
        results = engine.generate([tokens[:50], tokens[50:70]], max_tokens=60, seed=1, temperature=0.8)
        took = time.perf_counter() - started
        for prompt, result in zip((tokens[:50], tokens[50:70]), results, strict=True):
            wanted = plain.generate(prompt, max_tokens=60, seed=1, temperature=0.8).token_ids
            same = sum(a == b for a, b in zip(wanted, result.token_ids, strict=True))
            print(f"speculation: {same} of 60 tokens as plain, {result.statistics.tokens_per_round:.2f} a round")
        engine.loop.target.pages.check()
        print(f"engine: {120 / took:.0f} tokens/s; {engine.loop.target.pages.usage}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
