"""Every family is read back from both formats: the right spec, the right tensors, nothing before it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import quants

from outrider.errors import MissingPackageError, ModelFileError
from outrider.models import gguf as gguf_module
from outrider.models.base import MambaSpec, TransformerSpec
from outrider.models.folder import FolderFile
from outrider.models.gguf import GGUFFile
from outrider.models.gguf_header import STORAGES
from outrider.models.opening import open_model

import raw_gguf
import tiny

SCALINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_type": "linear", "factor": 4.0}),
    ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    ("qwen3", {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}),
    ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}),
]
# transformers writes into the dictionary it is given: hand out copies.
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7] * 2, "long_factor": [4.0] * 8}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_folder_is_read_back(family: str, tmp_path: Path) -> None:
    model = tiny.tiny(family)
    file = open_model(tiny.save_folder(model, tmp_path / "tiny-model"))
    assert isinstance(file, FolderFile)
    check_spec(file.spec, model)
    assert (file.name, file.eos_ids) == ("tiny-model", (2,))
    compare(file, folder_tensors(model))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_gguf_file_is_read_back(family: str, tmp_path: Path) -> None:
    model = tiny.tiny(family)
    file = open_model(tiny.save_gguf(model, tmp_path / "tiny-model.gguf", tokenizer=True))
    assert isinstance(file, GGUFFile)
    check_spec(file.spec, model)
    assert (file.name, file.eos_ids) == ("tiny-model", (2, 0))  # the key, then <|endoftext|> by its text
    wanted = {name: value for name, value in tiny.gguf_tensors(model).items() if "rope_" not in name}
    compare(file, wanted)


def test_rows_of_q_and_k_are_paired_in_llama_files_only(tmp_path: Path) -> None:
    for family, paired in (("llama", True), ("mistral", True), ("qwen2", False), ("qwen3", False), ("phi3", False)):
        spec = open_model(tiny.save_gguf(tiny.tiny(family), tmp_path / f"{family}.gguf")).spec
        assert isinstance(spec, TransformerSpec)
        assert spec.rope.interleaved == paired


@pytest.mark.parametrize(("family", "scaling"), SCALINGS)
def test_positions_are_scaled_as_in_transformers(family: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    given = {"rope_theta": 10000.0, **scaling}
    if given["rope_type"] == "llama3":
        given["original_max_position_embeddings"] = 32
    model = tiny.tiny(family, rope_parameters=given)
    for file in both(model, tmp_path):
        check_rope(file.spec, model)
    # as older transformers wrote it
    edit(tmp_path / "folder" / "config.json", _old_positions)
    check_rope(open_model(tmp_path / "folder").spec, model)


def test_longrope_uses_the_short_factors_up_to_the_original_length(tmp_path: Path) -> None:
    model = tiny.tiny("phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=64)
    for file in both(model, tmp_path):
        check_rope(file.spec, model)
        assert file.spec.context == 64


def test_a_phi3_folder_may_leave_out_the_original_context(tmp_path: Path) -> None:
    model = tiny.tiny("phi3", rope_parameters=dict(LONGROPE), max_position_embeddings=8192)
    folder = tiny.save_folder(model, tmp_path)
    left = {**LONGROPE, "rope_theta": 10000.0}  # without the original context that transformers writes there, too
    edit(folder / "config.json", lambda config: config | {"rope_parameters": left})
    edit(folder / "config.json", lambda config: config | {"original_max_position_embeddings": None})
    spec = open_model(folder).spec
    check_rope(spec, model)
    assert spec.context == 4096 and spec.rope.scale > 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("outside", [{}, {"rope_theta": 500.0}], ids=str)
def test_rope_scaling_stands_in_for_rope_parameters(outside: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.save_folder(tiny.tiny("qwen2", rope_parameters={"rope_theta": 77.0}), tmp_path)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    edit(folder / "config.json", lambda config: config | {"rope_scaling": scaling, **outside})
    check_rope(open_model(folder).spec, transformers.AutoModelForCausalLM.from_pretrained(folder))
    edit(folder / "config.json", lambda config: config | {"rope_scaling": {}})
    check_rope(open_model(folder).spec, transformers.AutoModelForCausalLM.from_pretrained(folder))


def test_windows(tmp_path: Path) -> None:
    def windows(family: str, **changes: Any) -> list[Any]:
        model = tiny.tiny(family, **changes)
        return [file.spec.windows for file in both(model, tmp_path)]  # type: ignore[union-attr]

    assert windows("llama") == [(), ()]
    assert windows("mistral") == [(8, 8), (8, 8)]
    assert windows("mistral", sliding_window=None) == [(), ()]
    assert windows("mistral", sliding_window=256) == [(), ()]  # no shorter than the context
    assert windows("phi3", sliding_window=16) == [(16, 16), (16, 16)]
    assert windows("qwen2", sliding_window=16) == [(), ()]  # not used unless it says so
    used = {"use_sliding_window": True, "sliding_window": 16}
    assert windows("qwen2", **used, max_window_layers=1) == [(None, 16, 16), (None, 16, 16)]
    types = ["sliding_attention", "full_attention"]
    assert windows("qwen3", **used, layer_types=types) == [(16, None), (16, None)]
    edit(tmp_path / "folder" / "config.json", lambda config: config | {"layer_types": None, "max_window_layers": 1})
    assert open_model(tmp_path / "folder").spec.windows == (None, 16)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["llama", "mamba"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied(family: str, tied: bool, tmp_path: Path) -> None:
    for file in both(tiny.tiny(family, tie_word_embeddings=tied), tmp_path):
        assert file.spec.tied == tied
        assert ("output.weight" in file.shapes) != tied


def test_an_output_matrix_that_is_stored_is_used(tmp_path: Path) -> None:
    """Whatever the config says, as in transformers."""
    model = tiny.tiny("llama")
    folder = tiny.save_folder(model, tmp_path)
    edit(folder / "config.json", lambda config: config | {"tie_word_embeddings": True})
    file = open_model(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    assert not file.spec.tied and np.array_equal(file.read("output.weight"), theirs.detach().numpy())


def test_heads_of_another_size(tmp_path: Path) -> None:
    for file in both(tiny.tiny("llama", head_dim=24), tmp_path):
        assert file.spec.head_dim == 24  # type: ignore[union-attr]


def test_shards(tmp_path: Path) -> None:
    model = tiny.tiny("qwen2")
    folder = tiny.save_folder(model, tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    compare(open_model(folder), folder_tensors(model))


def test_half_precision_stays(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny.tiny("mamba").to(dtype)
        file = open_model(tiny.save_folder(model, tmp_path / str(dtype)))
        embedding, decay = file.read("token_embd.weight"), file.read("blk.0.ssm_a")
        assert isinstance(embedding, torch.Tensor if dtype is torch.bfloat16 else np.ndarray)
        assert torch.equal(torch.as_tensor(embedding), model.backbone.embeddings.weight)
        assert decay.dtype == np.float32


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_quantised_files(kind: str, tmp_path: Path) -> None:
    model = tiny.tiny("llama")
    file = open_model(tiny.save_gguf(model, tmp_path / "model.gguf", types=kind))
    for name, value in tiny.gguf_tensors(model).items():
        read = file.read(name)
        assert read.dtype == (np.float16 if kind == "F16" and value.ndim > 1 else np.float32)
        if value.ndim > 1:
            number = gguf.GGMLQuantizationType[kind]
            value = quants.dequantize(quants.quantize(value, number), number)
        assert np.array_equal(read, value)


@pytest.mark.parametrize("number", STORAGES)
def test_every_type_is_decoded_as_gguf_does(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = gguf.GGMLQuantizationType(number)
    width = 256
    raw = raw_gguf.small_llama(width=width)
    raw.change("blk.0.ffn_up.weight", kind=number)
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.build())
    file = open_model(path)
    stored = gguf.GGUFReader(path).get_tensor(raw.index("blk.0.ffn_up.weight"))
    assert stored.tensor_type == kind
    with np.errstate(all="ignore"):
        wanted = quants.dequantize(stored.data, kind)
    for values in (2**18, 3 * width, 1):  # all rows at once, a few, one at a time
        monkeypatch.setattr(gguf_module, "DECODE_VALUES", values)
        assert np.array_equal(file.read("blk.0.ffn_up.weight"), wanted, equal_nan=True)


def test_the_table_of_types_is_ggufs() -> None:
    decoded = {kind for kind in gguf.GGMLQuantizationType if kind in quants._type_traits or kind.name in ("F32", "F16")}
    assert {number: tuple(storage) for number, storage in STORAGES.items()} == {
        int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in decoded
    }


def test_metadata(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_uint64("test.big", 2**63)
        writer.add_float64("test.pi", 3.25)
        writer.add_int8("test.minus", -3)
        writer.add_array("test.flags", [True, False])
        writer.add_array("test.words", ["a", "é", ""])

    file = GGUFFile(tiny.save_gguf(tiny.tiny("llama"), tmp_path / "model.gguf", tokenizer=True, more=more))
    assert file.metadata["general.architecture"] == "llama"
    tests = {key: value for key, value in file.metadata.items() if key.startswith("test.")}
    assert tests == {
        "test.big": 2**63,
        "test.pi": 3.25,
        "test.minus": -3,
        "test.flags": [True, False],
        "test.words": ["a", "é", ""],
    }
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 101
    assert file.metadata["tokenizer.ggml.merges"] == ["t h", "h e"]


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    raw = raw_gguf.small_llama()
    raw.version, raw.alignment = 2, 64
    path.write_bytes(raw.build())
    assert open_model(path).read("blk.0.attn_q.weight").shape == (8, 8)


def test_end_tokens(tmp_path: Path) -> None:
    folder = tiny.save_folder(tiny.tiny("llama"), tmp_path / "folder")
    edit(folder / "generation_config.json", lambda config: config | {"eos_token_id": [7, 2]})
    assert open_model(folder).eos_ids == (7, 2)
    (folder / "generation_config.json").unlink()
    assert open_model(folder).eos_ids == (2,)
    edit(folder / "config.json", lambda config: config | {"eos_token_id": None})
    assert open_model(folder).eos_ids == ()
    assert GGUFFile(tiny.save_gguf(tiny.tiny("llama"), tmp_path / "model.gguf")).eos_ids == ()
    metadata = {"tokenizer.ggml.tokens": ["<|im_end|>", "<|im_end|>", "<|eot_id|>"]}
    kinds = {"tokenizer.ggml.token_type": [4, 1, 3]}  # the second is just a piece
    assert gguf_module.end_tokens(tmp_path, metadata | kinds, 3) == (0, 2)


def test_the_hubs_cache_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--some-model" / "snapshots" / "0a1b2c"
    assert open_model(tiny.save_folder(tiny.tiny("llama"), folder)).name == "some-model"


def test_opening_a_gguf_file_reads_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    raw = raw_gguf.small_llama()
    raw.change("token_embd.weight", shape=(100_000_000, 8))  # 3.2 GB of nothing: the file is sparse
    path.write_bytes(raw.build(with_data=False))
    with path.open("r+b") as file:
        file.truncate(4_000_000_000)
    tracemalloc.start()
    opened = open_model(path)
    assert opened.shapes["token_embd.weight"] == (100_000_000, 8)
    view = opened.read("token_embd.weight")  # a view, even of this
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not view.flags.owndata
    assert peak < 20e6  # numpy may be imported in between


def test_opening_a_gguf_file_imports_no_numpy(tmp_path: Path) -> None:
    path = tiny.save_gguf(tiny.tiny("llama"), tmp_path / "model.gguf", tokenizer=True)
    code = f"""
import sys, pathlib
from outrider.models.opening import open_model
open_model(pathlib.Path({str(path)!r}))
print([name for name in ("numpy", "gguf", "torch", "safetensors") if name in sys.modules])
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_closing(tmp_path: Path) -> None:
    for file in both(tiny.tiny("llama"), tmp_path):
        view = file.read("blk.0.attn_q.weight")
        total = view.sum()
        file.close()
        assert view.sum() == total
        with pytest.raises(ModelFileError, match="closed"):
            file.read("blk.0.attn_q.weight")


@pytest.mark.parametrize("package", ["safetensors", "torch"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save_folder(tiny.tiny("llama"), tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=r"pip install 'outrider\[torch\]'"):
        open_model(folder)


def both(model: Any, path: Path) -> list[GGUFFile | FolderFile]:
    return [
        open_model(tiny.save_folder(model, path / "folder")),
        open_model(tiny.save_gguf(model, path / "model.gguf")),
    ]


def edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def check_spec(spec: TransformerSpec | MambaSpec, model: Any) -> None:
    config = model.config
    assert spec.family in (config.model_type, tiny.architecture(model))
    assert (spec.num_layers, spec.width, spec.num_columns) == (config.num_hidden_layers, config.hidden_size, 101)
    assert spec.norm_eps == pytest.approx(1e-5)
    assert spec.tied == config.tie_word_embeddings
    if isinstance(spec, MambaSpec):
        assert (spec.inner, spec.state, spec.conv, spec.dt_rank) == (128, 8, 4, 4)
        return
    head_dim = 32 if config.model_type == "qwen3" else 16
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.ffn_width) == (4, 2, head_dim, 96)
    assert spec.context == 256
    assert spec.windows == ((8, 8) if config.model_type == "mistral" else ())
    check_rope(spec, model)


def check_rope(spec: Any, model: Any) -> None:
    positions = model.model.rotary_emb
    np.testing.assert_allclose(spec.rope.frequencies, positions.inv_freq.numpy(), rtol=1e-5)
    assert spec.rope.scale == pytest.approx(positions.attention_scaling)


def compare(file: GGUFFile | FolderFile, wanted: dict[str, np.ndarray]) -> None:
    assert set(file.shapes) == set(wanted)
    for name, value in wanted.items():
        assert file.shapes[name] == value.shape, name
        np.testing.assert_allclose(file.read(name), value, rtol=1e-6, err_msg=name)


def folder_tensors(model: Any) -> dict[str, np.ndarray]:
    """By our names, with the rows as transformers has them."""
    config, tensors = model.config, tiny.gguf_tensors(model)
    if tiny.architecture(model) == "llama":
        weights = model.state_dict()
        for layer in range(config.num_hidden_layers):
            for one in "qk":
                theirs = weights[f"model.layers.{layer}.self_attn.{one}_proj.weight"]
                tensors[f"blk.{layer}.attn_{one}.weight"] = theirs.numpy()
    return {name: value for name, value in tensors.items() if "rope_" not in name}


def _old_positions(config: dict[str, Any]) -> dict[str, Any]:
    given = config.pop("rope_parameters")
    config["rope_theta"] = given.pop("rope_theta")
    config["partial_rotary_factor"] = given.pop("partial_rotary_factor", 1.0)
    kind = given.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **given}
    return config
