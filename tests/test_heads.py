"""Draft heads: every public layout is read, misfits and damage are refused, and the networks compute what theirs do.

The reference of a head is built from transformers' own layers.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from outrider.backends.base import Spans
from outrider.backends.eagle_head import EagleHead
from outrider.backends.head_base import Entries
from outrider.backends.heads import DraftVocabulary
from outrider.backends.medusa_head import MedusaHead
from outrider.backends.transformer import TransformerBackend
from outrider.errors import ModelFileError
from outrider.kv.pages import Pages
from outrider.models.head_spec import EagleSpec, MedusaSpec
from outrider.models.heads import FILES, HeadFile, Host, check_fit, open_head
from outrider.models.opening import open_model

import tiny
from tiny_heads import EAGLE, EAGLE3, MEDUSA, Weights, save_head

pytestmark = pytest.mark.usefixtures("one_thread")

TREE = [-1, -1, 0, 0, 1, 2, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.tiny("llama", num_hidden_layers=7)


@pytest.fixture(scope="module")
def target_path(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_folder(model, tmp_path_factory.mktemp("target"))


def target_at(path: Path, page_size: int = 4) -> TransformerBackend:
    return TransformerBackend(open_model(path), Pages(128, page_size))


def error(given: Any, wanted: Any) -> float:
    given, wanted = np.asarray(given), np.asarray(wanted)
    assert given.shape == wanted.shape
    return float(np.abs(given - wanted).max() / np.abs(wanted).max())


class Reference:
    """An EAGLE head made of transformers' layers: whole sequences, no cache."""

    def __init__(self, weights: Weights, file: HeadFile, model: Any, config: dict[str, Any]) -> None:
        self.weights, self.model, spec = weights, model, file.spec
        assert isinstance(spec, EagleSpec)
        self.spec = spec
        inner = config.get("transformer_layer_config", config)
        kind, layer = (
            (Qwen3Config, Qwen3DecoderLayer) if inner["model_type"] == "qwen3" else (LlamaConfig, LlamaDecoderLayer)
        )
        own = kind(**inner, attention_bias=any(name.endswith("q_proj.bias") for name in weights))
        own._attn_implementation = "eager"
        self.rotary = LlamaRotaryEmbedding(own)
        self.layers = [layer(own, index).eval() for index in range(own.num_hidden_layers)]
        for index, one in enumerate(self.layers):
            prefix = "midlayer." if index == 0 and "midlayer.hidden_norm.weight" in weights else f"layers.{index}."
            state = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            if spec.version == 3 and index == 0:
                for part in "qkv":
                    rows = getattr(one.self_attn, f"{part}_proj").out_features
                    setattr(one.self_attn, f"{part}_proj", nn.Linear(2 * own.hidden_size, rows, bias=False))
                self.hidden_norm = state.pop("hidden_norm.weight")
            elif "input_layernorm.weight" not in state:
                one.input_layernorm = nn.Identity()
            if own.attention_bias:
                one.self_attn.o_proj = nn.Linear(own.hidden_size, own.hidden_size, bias=False)
            one.load_state_dict(state)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        module = LlamaRMSNorm(len(weight), eps=1e-5)
        module.weight.data = weight
        return module(x)

    def fuse(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.spec.version == 1:
            return features[0]
        if "fc_norm.0.weight" in self.weights:
            features = [self.norm(one, self.weights[f"fc_norm.{index}.weight"]) for index, one in enumerate(features)]
        joined = torch.cat(list(features), dim=-1)
        if "input_norm.weight" in self.weights:
            joined = self.norm(joined, self.weights["input_norm.weight"])
        return functional.linear(joined, self.weights["fc.weight"], self.weights.get("fc.bias"))

    def run(
        self, tokens: Sequence[int], hidden: torch.Tensor, mask: torch.Tensor | None = None, depths: Any = None
    ) -> torch.Tensor:
        """Outputs of entries; mask: whether a row sees a column; depths: their positions."""
        count = len(tokens)
        embedding = self.weights.get("embed_tokens.weight", self.model.model.embed_tokens.weight)[torch.tensor(tokens)]
        visible = torch.tril(torch.ones(count, count, dtype=torch.bool)) if mask is None else mask
        additive = torch.zeros(1, 1, count, count).masked_fill(~visible, torch.finfo(torch.float32).min)
        positions = torch.arange(count)[None] if depths is None else torch.as_tensor(depths)[None]
        keys = {"attention_mask": additive, "position_embeddings": self.rotary(hidden[None], positions)}
        first = self.layers[0]
        with torch.inference_mode():
            if self.spec.version == 3:
                normed = self.norm(hidden, self.hidden_norm)
                residual = normed if self.spec.norm_before_residual else hidden
                seen = torch.cat([first.input_layernorm(embedding), normed], dim=-1)
                x = residual + first.self_attn(seen[None], **keys)[0][0]
                x = x + first.mlp(first.post_attention_layernorm(x))
            else:
                if "embedding_layernorm.weight" in self.weights:
                    embedding = self.norm(embedding, self.weights["embedding_layernorm.weight"])
                joined = torch.cat([embedding, hidden], dim=-1)
                x = functional.linear(joined, self.weights["fc.weight"], self.weights.get("fc.bias"))
                x = first(x[None], **keys)[0]
            for layer in self.layers[1:]:
                x = layer(x[None], **keys)[0]
        return x

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits over the target's tokens."""
        with torch.inference_mode():
            for name in ("norm.weight", "pre_lm_head_layernorm.weight"):
                if name in self.weights:
                    outputs = self.norm(outputs, self.weights[name])
            if "lm_head.weight" not in self.weights:
                return self.model.lm_head(outputs)
            rows = outputs @ self.weights["lm_head.weight"].T
            if "d2t" not in self.weights:
                return rows
            whole = torch.full((len(rows), self.model.config.vocab_size), -torch.inf)
            for own, offset in enumerate(self.weights["d2t"].tolist()):
                whole[:, own + offset] = rows[:, own]
            return whole

    def again(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.norm(outputs, self.weights["norm.weight"]).detach() if self.spec.norm_output else outputs


def reference(weights: Weights, path: Path, model: Any) -> Reference:
    return Reference(weights, open_head(path), model, json.loads((path / "config.json").read_text()))


def ours(name: str) -> str | None:
    """The name under which a head file gives a weight, found independently of the reader: by hand."""
    for theirs, mine in (
        ("embed_tokens", "token_embd"),
        ("embedding_layernorm", "token_embd_norm"),
        ("input_norm", "fc_norm"),
        ("pre_lm_head_layernorm", "output_norm"),
        ("midlayer.", "blk.0."),
        ("layers.", "blk."),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("lm_head", "output"),
    ):
        name = name.replace(theirs, mine)
    return {"norm.weight": "output_norm.weight", "t2d": None}.get(name, name)


@pytest.mark.parametrize("layout", [*EAGLE, *EAGLE3])
def test_eagle_files_are_read_back(layout: str, model: Any, tmp_path: Path) -> None:
    weights = save_head(tmp_path, layout, model)
    file = open_head(tmp_path)
    assert isinstance(file.spec, EagleSpec) and file.spec.version == (3 if "eagle3" in layout else 1)
    expected = {name: value for theirs, value in weights.items() if (name := ours(theirs)) is not None}
    assert file.shapes == {name: tuple(value.shape) for name, value in expected.items()}
    assert all(torch.equal(file.read(name), value) for name, value in expected.items())
    for name, value in expected.items():
        numbers = file.numbers(name)
        assert numbers.dtype == (np.float32 if value.is_floating_point() else np.int64)
        assert np.array_equal(numbers, value.numpy())
    assert file.name == tmp_path.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_of_other_precisions(dtype: torch.dtype, model: Any, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle3_speculators", model)
    weights = load_file(tmp_path / "model.safetensors")
    chosen = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    save_file(chosen, tmp_path / "model.safetensors")
    file = open_head(tmp_path)
    assert np.array_equal(file.numbers("fc.weight"), chosen["fc.weight"].float().numpy())
    assert np.array_equal(file.numbers("d2t"), chosen["d2t"].numpy())
    with pytest.raises(ModelFileError, match="the head has no tensor nothing"):
        file.numbers("nothing")


@pytest.mark.parametrize("layout", MEDUSA)
def test_medusa_files_are_read_back(layout: str, model: Any, tmp_path: Path) -> None:
    weights = save_head(tmp_path, layout, model)
    file = open_head(tmp_path)
    assert isinstance(file.spec, MedusaSpec) and (file.spec.num_heads, file.spec.num_layers) == (3, 2)
    for theirs, value in weights.items():
        parts = theirs.split(".")
        name = {"output": "output.weight", "token_map": "ids"}.get(theirs)
        if name is None:
            own = f"block.{parts[1]}.{parts[3]}" if "linear" in theirs else "output.weight"
            name = f"head.{parts[0]}.{own}"
        assert torch.equal(file.read(name), value), name
    assert len(file.shapes) == len(weights)
    assert open_head(next(path for name in FILES if (path := tmp_path / name).exists())).shapes == file.shapes


@pytest.mark.parametrize("layout", MEDUSA)
def test_medusa_heads_compute_what_theirs_do(layout: str, model: Any, target_path: Path, tmp_path: Path) -> None:
    weights, target = save_head(tmp_path, layout, model), target_at(target_path)
    head = MedusaHead(open_head(tmp_path), target)
    tokens = [5, 9, 77, 2]
    slot = target.open(tokens, 8)
    states = target.score(Spans([slot], [0], [4], [1], np.array(tokens)), hidden=head.hidden).hidden[head.hidden[0]]
    with torch.inference_mode():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0]  # after the output norm
        wanted = []
        for number in range(3):
            x = hidden
            for block in range(2):
                linear = f"{number}.{block}.linear"
                x = x + functional.silu(
                    functional.linear(x, weights[f"{linear}.weight"], weights.get(f"{linear}.bias"))
                )
            matrix = weights.get(f"{number}.2.weight", weights.get("output", model.lm_head.weight))
            rows = x @ matrix.T
            if "token_map" in weights:
                ids, own = weights["token_map"], rows
                rows = torch.full((4, 101), -torch.inf)
                rows[:, ids] = own if own.shape[1] == len(ids) else own[:, ids]
            wanted.append(rows)
    given = head.rows(torch.as_tensor(states), 3)
    expected = torch.stack(wanted, dim=1)
    assert torch.equal(given.isinf(), expected.isinf())
    assert error(given.nan_to_num(neginf=0), expected.nan_to_num(neginf=0)) < 1e-4
    assert torch.allclose(head.rows(torch.as_tensor(states), 2), given[:, :2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [*EAGLE, *EAGLE3])
def test_eagle_heads_compute_what_theirs_do(layout: str, model: Any, target_path: Path, tmp_path: Path) -> None:
    """On the target's own hidden states: read in pieces, as a tree of guesses in several passes, and beside another."""
    weights, target = save_head(tmp_path, layout, model), target_at(target_path)
    theirs, head = reference(weights, tmp_path, model), EagleHead(open_head(tmp_path), target)
    generator = np.random.default_rng(3)
    tokens = generator.integers(0, 101, 18).tolist()
    slot = target.open(tokens, 40)
    states = target.score(Spans([slot], [0], [17], [1], np.array(tokens[:17])), hidden=head.hidden).hidden
    hidden = head.fuse([torch.as_tensor(states[layer]) for layer in head.hidden])
    with torch.inference_mode():
        all_states = model(torch.tensor([tokens[:17]]), output_hidden_states=True).hidden_states
    chosen = {"eagle3_forge": (1, 3, 5)}.get(layout, (1, 3, 6) if theirs.spec.features else (2, 3, 4))
    wanted_hidden = theirs.fuse([all_states[layer][0] for layer in (chosen if theirs.spec.version == 3 else (-1,))])
    assert error(hidden, wanted_hidden.detach()) < 1e-4
    wanted = theirs.run(tokens[1:], wanted_hidden)

    outputs = []
    for start, stop in ((0, 1), (1, 9), (9, 17)):
        entries = Entries([slot], [0], [start], [stop - start], tokens[start + 1 : stop + 1], hidden[start:stop])
        outputs.append(head.read(entries))
    assert error(torch.cat(outputs), wanted) < 1e-4
    rows, wanted_rows = head.rows(outputs[-1]), theirs.rows(wanted[9:])
    assert torch.equal(rows.isinf(), wanted_rows.isinf())
    assert error(rows.nan_to_num(neginf=0), wanted_rows.nan_to_num(neginf=0)) < 1e-4

    nodes = generator.integers(0, 101, len(TREE)).tolist()
    feed = torch.randn(len(TREE), hidden.shape[1], generator=torch.Generator().manual_seed(1))
    mask, depths = tree_mask(17, TREE)
    all_hidden = torch.cat([wanted_hidden.detach(), feed])
    wanted_tree = theirs.run(tokens[1:] + nodes, all_hidden, mask, depths)[17:]
    other = target.open([1, 2, 3], 40)
    levels = []
    for start, stop in ((0, 2), (2, 5), (5, 6), (6, 7)):
        count = stop - start
        both = Entries(
            slots=[other, slot],
            firsts=[0, 0],
            starts=[4 * start, 17 + start],
            counts=[4, count],
            tokens=[7, 7, 7, 7, *nodes[start:stop]],
            hidden=torch.cat([hidden[:4], feed[start:stop]]),
            parents={1: TREE[:stop]},
        )
        levels.append(head.read(both)[4:])
    assert error(torch.cat(levels), wanted_tree) < 1e-4
    assert error(head.again(levels[0]), theirs.again(wanted_tree[:2])) < 1e-4


def tree_mask(before: int, parents: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    size = before + len(parents)
    mask = torch.tril(torch.ones(size, size, dtype=torch.bool))
    mask[before:, before:] = False
    depths = list(range(before))
    for node, parent in enumerate(parents):
        mask[before + node, before + node] = True
        if parent >= 0:
            mask[before + node] |= mask[before + parent]
        depths.append(before if parent < 0 else depths[before + parent] + 1)
    return mask, depths


def test_a_head_that_starts_late_sees_what_it_has_read(model: Any, target_path: Path, tmp_path: Path) -> None:
    weights, target = save_head(tmp_path, "eagle3", model), target_at(target_path)
    theirs, head = reference(weights, tmp_path, model), EagleHead(open_head(tmp_path), target)
    slot = target.open([1] * 9, 20)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    given = head.read(Entries([slot], [5], [5], [4], [4, 8, 15, 16], hidden))
    assert error(given, theirs.run([4, 8, 15, 16], hidden)) < 1e-4, "distances are all that positions tell"


def test_entries_belong_to_their_pages(model: Any, target_path: Path, tmp_path: Path) -> None:
    """Edges of pages are kept, and pages are copied as a whole."""
    save_head(tmp_path, "eagle", model)
    target = target_at(target_path)
    head = EagleHead(open_head(tmp_path), target)
    slot = target.open([1] * 11, 20)
    assert target.pages.make_room(slot, 12)
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    head.keep_edges(slot, 2, hidden)  # positions 2 to 10: pages end at 3 and 7
    assert torch.equal(head.edge(slot, 3)[0], hidden[1]) and torch.equal(head.edge(slot, 7)[0], hidden[5])
    pages = target.pages.leases[slot].pages
    head.store.copy_page(pages[1], pages[2])
    assert torch.equal(head.edge(slot, 11)[0], hidden[5])


def test_own_copies_of_the_targets_matrices_are_not_kept(model: Any, target_path: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle_safetensors", model)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embed_tokens.weight"] = model.model.embed_tokens.weight.detach()
    weights["lm_head.weight"] = model.lm_head.weight.detach()
    save_file(weights, tmp_path / "model.safetensors")
    head = EagleHead(open_head(tmp_path), target_at(target_path))
    assert head._embedding is None and head._output is None


# What does not fit

HOST = Host("tiny", 64, 7, 101, 101)
MISFITS: list[tuple[str, Host, str]] = [
    ("medusa", HOST._replace(width=48), "hidden states of width 64, the model's have 48"),
    ("medusa", HOST._replace(vocab_size=90, num_columns=96), "made for 101 tokens, the model has 90 and 6 of padding"),
    ("eagle", HOST._replace(width=128), "hidden states of width 64, the model's have 128"),
    (
        "eagle",
        HOST._replace(vocab_size=120, num_columns=120),
        "made for 101 tokens, the model has 120; take",
    ),
    ("eagle3", HOST._replace(num_layers=6), r"after layers \[2, 3, 3\], which must differ and be among 6"),
    ("eagle3_speculators", HOST._replace(num_layers=4), r"after layers \[1, 3, 6\], which must differ and be among 4"),
    ("eagle3_narrow", HOST._replace(width=32), "hidden states of width 64, the model's have 32"),
]


@pytest.mark.parametrize(("layout", "host", "reason"), MISFITS)
def test_misfits_are_refused(layout: str, host: Host, reason: str, model: Any, tmp_path: Path) -> None:
    save_head(tmp_path, layout, model)
    file = open_head(tmp_path)
    check_fit(file, HOST)
    check_fit(file, HOST._replace(vocab_size=99))  # the rest is padding
    with pytest.raises(ModelFileError, match=f"does not fit tiny: .*{reason}") as caught:
        check_fit(file, host)
    assert caught.value.param == "draft" and str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize("layout", ["medusa", "eagle", "eagle3", "eagle_safetensors"])
def test_a_head_is_no_model(layout: str, model: Any, tmp_path: Path) -> None:
    save_head(tmp_path, layout, model)
    kind = layout[:6] if layout == "medusa" else "eagle"
    with pytest.raises(ModelFileError, match=rf"holds {kind} heads, not a model; .* {kind}:"):
        open_model(tmp_path)


def test_a_model_is_no_head() -> None:
    with pytest.raises(ModelFileError, match=r"is a model, not a head; name it as the draft without eagle:"):
        open_head("some.gguf")


def test_a_narrow_head_needs_matrices_of_its_own(model: Any, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle3_narrow", model)
    change_tensors(tmp_path, lambda weights: weights.pop("embed_tokens.weight"))
    with pytest.raises(ModelFileError, match=r"its width is 32, the model's 64, and it has no token_embd\.weight"):
        check_fit(open_head(tmp_path), HOST)


def change_tensors(path: Path, change: Callable[[Weights], object]) -> None:
    weights = torch.load(path / "pytorch_model.bin", weights_only=True)
    change(weights)
    torch.save(weights, path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d2t: d2t + 200, "not all among the target's 101"),
        (lambda d2t: d2t - 200, "not all among the target's 101"),
        (lambda d2t: -torch.arange(len(d2t)), "two of its tokens are the same"),
    ],
)
def test_tokens_that_are_none(change: Any, reason: str, model: Any, target_path: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle3", model)
    change_tensors(tmp_path, lambda weights: weights.update(d2t=change(weights["d2t"])))
    with pytest.raises(ModelFileError, match=reason):
        EagleHead(open_head(tmp_path), target_at(target_path))


def test_draft_tokens_among_the_padding_are_left_out(model: Any, target_path: Path, tmp_path: Path) -> None:
    weights = save_head(tmp_path, "eagle3", model)
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    target = TransformerBackend(open_model(target_path), Pages(8, 4), vocab_size=int(ids[-1]))
    rows = DraftVocabulary(open_head(tmp_path), target).spread(torch.arange(float(len(ids)))[None])
    assert rows.shape == (1, int(ids[-1])) and rows[0, ids[:-1]].tolist() == list(range(len(ids) - 1))
    assert int(rows.isfinite().sum()) == len(ids) - 1


def config(path: Path, **changes: Any) -> None:
    given = json.loads((path / "config.json").read_text()) | changes
    kept = {key: value for key, value in given.items() if value != "gone"}
    (path / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        ("medusa", {"medusa_num_heads": 9}, "medusa_num_heads is 9, but the file holds 3"),
        ("medusa", {"medusa_num_layers": 1}, r"'0.2.weight' is of a kind|block.1.weight' does not belong"),
        ("medusa", {"medusa_num_heads": "x"}, "must be a whole number"),
        ("eagle", {"num_hidden_layers": 2}, "blk.1.attn_q.weight is missing"),
        ("eagle", {"hidden_size": 32}, r"fc.weight has shape \[64, 128\], the head needs \[32, 64\]"),
        ("eagle", {"model_type": "mamba"}, "the model_type 'mamba' cannot be read"),
        ("eagle_norms", {"layernorms": False}, "layernorms must be true"),
        ("eagle_speculators", {"transformer_layer_architecture": "X"}, "the layer 'X' cannot be computed"),
        ("eagle_speculators", {"speculators_model_type": "dflash"}, "only eagle, eagle3 and medusa"),
        ("eagle_speculators", {"transformer_layer_config": 3}, "must be a set of keys"),
        ("eagle3", {"draft_vocab_size": 41}, r"output.weight has shape \[40, 64\]|d2t has shape"),
        ("eagle3", {"draft_vocab_size": 400}, "draft_vocab_size is 400, more than vocab_size, 101"),
        ("eagle3_forge", {"eagle_config": {"use_aux_hidden_state": False}}, "read one layer only"),
        ("eagle3_forge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, "a"]}}, "must be a list of layers"),
        ("eagle3_speculators", {"norm_before_residual": "gone"}, "the key norm_before_residual is missing"),
        ("eagle3_norms", {"norm_before_fc": False}, "norm_before_fc must be true"),
        ("eagle3_deep", {"fc_norm": False}, "fc_norm must be true"),
        ("eagle3_speculators", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight has shape \[64, 192\]"),
    ],
)
def test_configs_that_do_not_go_with_the_tensors(
    layout: str, changes: dict[str, Any], reason: str, model: Any, tmp_path: Path
) -> None:
    save_head(tmp_path, layout, model)
    config(tmp_path, **changes)
    refused(tmp_path, reason)


def test_a_head_with_a_sliding_window(model: Any, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle3_speculators", model)
    inner = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    config(tmp_path, transformer_layer_config=inner | {"layer_types": ["sliding_attention"]})
    refused(tmp_path, "a head with a sliding window")


def test_missing_unknown_and_odd_tensors_are_named(model: Any, tmp_path: Path) -> None:
    for layout in ("eagle", "eagle3"):
        weights = save_head(tmp_path / layout, layout, model)
        for theirs in weights:
            name = ours(theirs)
            if (
                name is None
                or theirs == "embed_tokens.weight"
                or theirs.endswith(".bias")
                or theirs == "lm_head.weight"
            ):
                continue  # the target's will do
            save_head(tmp_path / layout, layout, model)
            change_tensors(tmp_path / layout, lambda held, theirs=theirs: held.pop(theirs))
            refused(
                tmp_path / layout, "missing|has shape" if "hidden_norm" in theirs else f"the tensor {name} is missing"
            )
    save_head(tmp_path / "eagle", "eagle", model)
    for change, reason in (
        (
            lambda held: held.update({"layers.0.mlp.down_proj.bias": torch.zeros(64)}),
            "down_proj.bias.*cannot be computed",
        ),
        (lambda held: held.update({"layers.3.mlp.up_proj.weight": torch.zeros(3, 3)}), "does not belong"),
        (lambda held: held.update({"model.fc.weight": torch.zeros(3, 3)}), "is there twice"),
        (
            lambda held: held.update({"fc.weight": held["fc.weight"].to(torch.int8)}),
            "has the type torch.int8, only F64",
        ),
        (lambda held: held.update({"fc.weight": torch.zeros(1, 1).expand(64, 128)}), None),
        (lambda held: held.update({"fc.weight": torch.zeros(1, 1).expand(2**20, 2**20)}), "larger than the file"),
        (lambda held: held.update({"fc.weight": held["fc.weight"].to_sparse()}), "not a plain one|cannot be read"),
        (lambda held: held.update({"fc.weight": 3}), "tensors by name and nothing else"),
    ):
        save_head(tmp_path / "eagle", "eagle", model)
        change_tensors(tmp_path / "eagle", change)
        if reason is None:
            open_head(tmp_path / "eagle")
        else:
            refused(tmp_path / "eagle", reason)


def refused(path: Path, reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason) as caught:
        open_head(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_no_pickle_is_executed(model: Any, tmp_path: Path) -> None:
    marker = tmp_path / "executed"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (marker.touch, ())

    save_head(tmp_path, "eagle", model)
    weights = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    torch.save({**weights, "extra": Trap()}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "what is no tensor is not executed")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refused(tmp_path, "not a file of torch.save")
    assert not marker.exists()


def test_files_that_are_no_heads(model: Any, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such file or folder")
    refused(tmp_path, "there is no head")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "cut into several files")
    save_head(tmp_path, "eagle", model)
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    with (
        zipfile.ZipFile(tmp_path / "pytorch_model.bin") as stored,
        zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))
    (tmp_path / "packed.bin").replace(tmp_path / "pytorch_model.bin")
    refused(tmp_path, "compressed")
    (tmp_path / "pytorch_model.bin").write_bytes(whole[:-30])
    refused(tmp_path, "damaged")
    (tmp_path / "pytorch_model.bin").write_bytes(whole)
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "config.json: the file is missing")


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        ("medusa", "medusa_lm_head.pt"),
        ("medusa", "config.json"),
        ("vllm_reduced", "model.safetensors"),
        ("eagle", "pytorch_model.bin"),
        ("eagle3_norms", "model.safetensors"),
        ("eagle3_norms", "config.json"),
        ("eagle3_forge", "config.json"),
    ],
)
def test_mutants(layout: str, part: str, model: Any, tmp_path: Path) -> None:
    """A damaged head is a ModelFileError or a head that can be read: nothing else is raised."""
    chance = random.Random(layout + part)
    save_head(tmp_path, layout, model)
    assert survives(tmp_path, chance)
    whole = (tmp_path / part).read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0] if part.endswith(".safetensors") else min(len(whole), 6000)
    survivors = 0
    for turn in range(150):
        content = damaged(whole, header, chance)
        if part == "config.json" and turn % 2:
            content = json.dumps(changed(json.loads(whole), chance)).encode()
        elif part.endswith((".pt", ".bin")) and turn % 2:
            content = repacked(tmp_path / part, whole, chance)
        (tmp_path / part).write_bytes(content)
        survivors += survives(tmp_path, chance)
    assert 0 < survivors < 150


def survives(path: Path, chance: random.Random) -> bool:
    try:
        file = open_head(path)
        for name in chance.sample(sorted(file.shapes), 3):
            file.read(name).double().sum()
    except ModelFileError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error) and len(str(error)) < 700
        return False
    return True


def damaged(whole: bytes, header: int, chance: random.Random) -> bytes:
    """Bytes changed, cut out or inserted, mostly within the header."""
    data = bytearray(whole)
    for _ in range(chance.choice([1, 1, 2, 4])):
        start = chance.randrange(max(1, min(header, len(data)) if chance.random() < 0.8 else len(data)))
        kind = chance.randrange(4)
        if kind == 0:
            data[start : start + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del data[start : start + chance.choice([1, 8, 100])]
        elif kind == 2:
            data[start:start] = chance.randbytes(chance.choice([1, 8, 100]))
        else:
            data[start : start + 8] = struct.pack("<Q", chance.choice([0, 1, 255, 2**31, 2**40, 2**63]))
    return bytes(data)


def repacked(path: Path, whole: bytes, chance: random.Random) -> bytes:
    """The same archive with a damaged pickle in it: checksums are right, so torch reads it."""
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as stored:
        entries = {entry.filename: stored.read(entry) for entry in stored.infolist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    entries[name] = damaged(entries[name], len(entries[name]), chance)
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)
    return path.read_bytes()


def changed(values: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Some entries replaced or taken away, those of sets within included."""
    odd = [None, True, 0, 1, -1, 2, 2**40, 10**400, 0.5, 1e308, float("nan"), "", "llama", [], [1], [3, 4, 5], {}]
    for _ in range(chance.choice([1, 2, 3])):
        inner = [value for value in values.values() if isinstance(value, dict) and value]
        at = chance.choice(inner) if inner and chance.random() < 0.5 else values
        key = chance.choice(list(at))
        if chance.random() < 0.2:
            del at[key]
        else:
            at[key] = chance.choice(odd)
    return values
