"""The transformers adapter: rows as the model itself gives them, what its cache can do found out, exact speculation."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from outrider.backends.base import Spans
from outrider.backends.hf import HFBackend
from outrider.errors import BackendError, ConfigError, ModelFileError
from outrider.models.opening import open_model

from slot_machine import answers, error, feed, machine, reference
from tiny import save_folder, save_gguf, tiny

LIMIT = 1e-4
VOCAB = 101
TEXT = [int(token) for token in np.random.default_rng(4).integers(0, VOCAB, 40)]
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@cache
def model(family: str, seed: int = 0) -> Any:
    return tiny(family, seed=seed)


def backend(family: str = "llama", seed: int = 0, **settings: Any) -> HFBackend:
    return HFBackend(model(family, seed), **settings)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "mamba"])
@pytest.mark.parametrize("pieces", [[40], [9, 1, 20, 1, 1, 8], [1, 39]], ids=str)
def test_rows_are_the_models_own(family: str, pieces: list[int]) -> None:
    ours, rows, begin = backend(family), [], 0
    slot = ours.open()
    for count in pieces:
        rows.append(feed(ours, (slot, TEXT[begin : begin + count], count)).logits)
        begin += count
    assert error(np.concatenate(rows), reference(model(family), TEXT)) < LIMIT


@pytest.mark.parametrize(
    ("family", "max_rewind", "chunked"),
    [("llama", None, True), ("qwen3", None, True), ("mistral", 0, True), ("mamba", 0, False)],
)
def test_what_the_cache_can_do_is_found_out(family: str, max_rewind: int | None, chunked: bool) -> None:
    """Mistral's cache drops what is behind its window; transformers' Mamba starts over on several tokens."""
    ours = backend(family)
    assert ours.info.max_rewind == max_rewind and ours._chunked is chunked and not ours.info.trees
    assert ours.info.context == (2**20 if family == "mamba" else 256)
    assert ours.info.num_hidden == model(family).config.num_hidden_layers + 1


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so once, on processors without bfloat16
@pytest.mark.parametrize(("family", "chunked"), [("llama", True), ("mistral", True), ("mamba", False)])
def test_in_half_precision_a_lost_past_can_hide(family: str, chunked: bool) -> None:
    """So only caches with an entry for every token are fed several at once."""
    ours = HFBackend(tiny(family).to(torch.bfloat16))
    slot = ours.open()
    assert ours._chunked is chunked
    rows = [feed(ours, (slot, part, 20)).logits for part in (TEXT[:20], TEXT[20:])]
    assert error(np.concatenate(rows), reference(model(family), TEXT)) < 0.03


def test_a_window_that_is_never_full_drops_nothing() -> None:
    assert backend("mistral", context=8).info.max_rewind == 0
    ours = backend("mistral", context=7)
    assert ours.info.max_rewind is None
    slot = ours.open()
    feed(ours, (slot, TEXT[:7], 0))
    ours.rewind(slot, 3)
    wanted = reference(model("mistral"), [*TEXT[:3], *TEXT[20:23]])[3:]
    assert error(feed(ours, (slot, TEXT[20:23], 3)).logits, wanted) < LIMIT


def test_a_cache_that_only_pretends_to_crop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.DynamicCache, "crop", lambda self, tokens: None)
    assert backend().info.max_rewind == 0


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (transformers.GPT2LMHeadModel, {"n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}),
        (transformers.OPTForCausalLM, {"ffn_dim": 32, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
        (transformers.GPTNeoXForCausalLM, {"intermediate_size": 32}),
    ],
)
def test_families_without_a_backend_of_their_own(kind: Any, changes: dict[str, Any]) -> None:
    made = kind(kind.config_class(**SMALL, **changes)).eval()
    ours = HFBackend(made)
    slot = ours.open()
    tokens = [token % 50 for token in TEXT[:20]]
    rows = feed(ours, (slot, tokens[:12], 12)).logits
    feed(ours, (slot, [1, 2, 3], 0))
    ours.keep([slot], [12])
    rows = np.concatenate([rows, feed(ours, (slot, tokens[12:], 8)).logits])
    assert error(rows, reference(made, tokens)) < LIMIT and ours.info.max_rewind is None


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_hidden_states_are_before_the_final_norm(family: str) -> None:
    ours, made = backend(family), model(family)
    slot, count = ours.open(), made.config.num_hidden_layers
    feed(ours, (slot, TEXT[:3], 0))
    given = feed(ours, (slot, TEXT[3:9], 1), hidden=range(count + 1)).hidden
    with torch.inference_mode():
        theirs = made(torch.tensor([TEXT[:9]]), use_cache=False, output_hidden_states=True).hidden_states
        normed = made.get_decoder().norm if family == "llama" else made.backbone.norm_f
        last = normed(torch.tensor(given[count])).numpy()
        embedded = made.get_input_embeddings()(torch.tensor(TEXT[3:9])).numpy()
    assert np.array_equal(given[0], embedded)
    assert error(last, theirs[-1][0, 3:].numpy()) < LIMIT
    for index in range(1, count):  # transformers' Mamba has no entry for the embedding
        assert error(given[index], theirs[index - (family == "mamba")][0, 3:].numpy()) < LIMIT


def test_a_rewind_leaves_no_trace() -> None:
    ours = backend()
    slot, other = ours.open(), ours.open()
    feed(ours, (slot, TEXT[:11], 1), (other, TEXT[:3], 1))
    twin = ours.fork(slot)
    feed(ours, (slot, TEXT[30:35], 5), (other, TEXT[3:6], 3))
    ours.keep([other, slot], [4, 11])
    before, after = ours.save(twin), ours.save(slot)
    for theirs, own in zip(before["layers"], after["layers"], strict=True):
        assert np.array_equal(theirs["keys"], own["keys"]) and np.array_equal(theirs["values"], own["values"])
    straight, back = (feed(ours, (one, TEXT[11:14], 3)).logits for one in (twin, slot))
    assert np.array_equal(straight, back) and error(back, reference(model("llama"), TEXT[:14])[-3:]) < LIMIT


@pytest.mark.parametrize("family", ["llama", "mistral", "mamba"])
def test_saved_states_move_between_backends(family: str) -> None:
    ours, theirs = backend(family), backend(family)
    slot = ours.open()
    feed(ours, (slot, TEXT[:20], 0))
    state = pickle.loads(pickle.dumps(ours.save(slot)))
    feed(ours, (slot, [5], 0))  # what was saved is a copy
    copies = [theirs.load(state), theirs.load(state)]
    for token, copy in zip((7, 8), copies, strict=True):
        assert theirs.length(copy) == 20
        assert (
            error(feed(theirs, (copy, [token], 1)).logits, reference(model(family), [*TEXT[:20], token])[-1:]) < LIMIT
        )
    with pytest.raises(BackendError, match="the saved state has 1 layers, "):
        theirs.load({**state, "layers": state["layers"][:1]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"starts": [2]}, "slot 0 holds 3 tokens but was fed position 2"),
        ({"tokens": np.array([5, 101])}, "token 101 is not in a vocabulary of 101"),
        ({"counts": [14], "tokens": np.zeros(14, int)}, "slot 0 would hold 17 tokens in a context of 16"),
        ({"slots": [9]}, "there is no slot 9; 1 are open"),
        ({"parents": {0: [-1, -1]}}, "tiny reads chains only; spans [0] are trees"),
    ],
)
def test_passes_that_are_refused(change: dict[str, Any], said: str) -> None:
    ours = backend(name="tiny", context=16)
    slot = ours.open()
    feed(ours, (slot, TEXT[:3], 0))
    given = {"slots": [slot], "starts": [3], "counts": [2], "rows": [1], "tokens": np.array([5, 6]), **change}
    with pytest.raises(BackendError, match=f"^{re.escape(said)}$"):
        ours.score(Spans(**given))
    with pytest.raises(BackendError, match="tiny reads chains only; paths were given for slots"):
        ours.keep([slot], [3], {slot: [2]})
    assert ours.length(slot) == 3


def test_other_refusals() -> None:
    ours = backend("mamba")
    slot = ours.open()
    feed(ours, (slot, TEXT[:3], 0))
    with pytest.raises(BackendError, match="slot 0 cannot rewind 1 tokens to 2; it goes back to 3"):
        ours.rewind(slot, 2)
    rwkv = transformers.RwkvConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    with pytest.raises(ConfigError, match="RwkvForCausalLM takes no cache this adapter knows"):
        HFBackend(transformers.RwkvForCausalLM(rwkv))
    bloom = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2)
    with pytest.raises(ConfigError, match="BloomForCausalLM names no context; pass context="):
        HFBackend(transformers.BloomForCausalLM(bloom))
    gemma = transformers.RecurrentGemmaConfig(**SMALL, intermediate_size=64, lru_width=32, num_key_value_heads=1)
    with pytest.raises(ConfigError, match="RecurrentGemmaForCausalLM returns no past_key_values"):
        HFBackend(transformers.RecurrentGemmaForCausalLM(gemma), context=64)


@pytest.mark.parametrize("context", [2, 3, 8])
def test_a_short_context_is_not_overrun_by_the_probe(context: int) -> None:
    config = transformers.GPT2Config(**SMALL, n_positions=context, bos_token_id=1, eos_token_id=2)
    ours = HFBackend(transformers.GPT2LMHeadModel(config).eval())
    assert ours.info.context == context and ours.info.max_rewind is None


def test_from_a_folder_and_from_a_gguf_file(tmp_path: Path) -> None:
    folder = save_folder(model("llama"), tmp_path / "folder")
    file = save_gguf(model("llama"), tmp_path / "tiny.gguf", tokenizer=True)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": 7}))
    for path in (folder, file):
        ours = HFBackend.from_path(path)
        assert ours.info.name == path.name and ours.info.context == 256
        assert ours.info.eos_ids == open_model(path).eos_ids and len(ours.info.eos_ids) == 2
        assert error(feed(ours, (ours.open(), TEXT, 5)).logits, reference(model("llama"), TEXT)[-5:]) < LIMIT


def test_folders_it_cannot_load(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(ModelFileError) as caught:
            HFBackend.from_path(path)
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
        return str(caught.value)

    assert "there is no such file or folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "transformers cannot load it: " in refused(tmp_path / "empty")
    pickled = save_folder(model("llama"), tmp_path / "pickled")
    torch.save(model("llama").state_dict(), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert "safetensors" in refused(pickled)
    deeper = save_folder(model("llama"), tmp_path / "deeper")
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "9 tensors are missing, model.layers.2." in refused(deeper)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    assert "transformers cannot load it: " in refused(broken)


def test_without_transformers_the_cure_is_named() -> None:
    code = (
        "import sys\nsys.modules['transformers'] = None\n"
        "from outrider.errors import MissingPackageError\n"
        "try:\n    import outrider.backends.hf\nexcept MissingPackageError as error:\n    print(error)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == "transformers is not installed; run: pip install 'outrider[hf]'\n"


TestSlots = machine(backend, model("llama"), max_rewind=None, runs=5)
TestSlotsThatCannotRewind = machine(lambda: backend("mamba"), model("mamba"), max_rewind=0, runs=2)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_speculation_says_what_plain_decoding_says(rule: str) -> None:
    ours, twin = backend(), backend()
    plain = answers(ours, rule).tokens
    for draft, width in ((twin, 4), (backend(seed=1), 3), ("ngram", 5), (backend("mamba"), 2)):
        spec = answers(ours, rule, draft=draft, width=width, prefill_chunk=6)
        assert spec.tokens == plain and spec.statistics.drafted > 0
        assert draft is not twin or spec.statistics.rejected == 0


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("mamba", "greedy"),
        pytest.param("mamba", "coupled", marks=pytest.mark.slow),
        ("mistral", "greedy"),
        ("mistral", "coupled"),
    ],
)
def test_a_target_that_cannot_rewind_drafts_one_token_at_most(family: str, rule: str) -> None:
    ours = backend(family)
    plain = answers(ours, rule).tokens
    spec = answers(ours, rule, draft=backend(family), width=4)
    assert spec.tokens == plain and max(spec.statistics.rounds_by_depth) == 1
    assert any("cannot rewind" in why for why in spec.statistics.fallbacks)
