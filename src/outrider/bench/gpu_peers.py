"""The same batches by transformers' continuous batching, on the same GPU and shape."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from outrider.backends.torch_common import dtype_for
from outrider.bench.gpu import Line
from outrider.errors import ConfigError
from outrider.models.random_file import SHAPES

QUICK = 32  # tokens of an answer: it takes ten times as long as we do, and what counts is a rate


def transformers_batches(shape: str, device: str, sizes: Sequence[int], prompt: int, length: int) -> Iterator[Line]:
    """Tokens a second from the first token on: neither the reading of prompts nor its warm-up counts against it."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers import __version__ as version

    spec = SHAPES[shape]
    if spec.family != "llama":
        raise ConfigError(f"the peer is measured with shapes of the llama family, {shape} is {spec.family}")
    config = LlamaConfig(
        vocab_size=spec.num_columns,
        hidden_size=spec.width,
        intermediate_size=spec.ffn_width,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=spec.tied,
    )
    kind: Any = LlamaForCausalLM
    with torch.device(device):
        model: Any = kind._from_config(config, dtype=dtype_for(torch.device(device)), attn_implementation="sdpa")
    model.eval()
    given: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    random = np.random.default_rng(0)
    for batch in sizes:
        prompts = [random.integers(0, spec.num_columns, prompt).tolist() for _ in range(batch)]
        rates = []
        for _ in range(2):
            results = model.generate_batch(prompts, generation_config=given, record_timestamps=True).values()
            times = sorted(time for result in results for time in result.timestamps)
            done = sum(len(result.generated_tokens) for result in results)
            if done != batch * length:
                raise ConfigError(f"transformers gave {done} of {batch * length} tokens; it cannot be compared")
            rates.append((done - batch) / (times[-1] - times[0]))
        yield Line(f"{batch} at once, transformers {version}", max(rates), "tokens/s", min(rates), max(rates))
    del model
    gc.collect()
    torch.cuda.empty_cache()
