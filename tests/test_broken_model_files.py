"""A broken model file is a ModelFileError that names file and reason: nothing else is raised, little is allocated.

That goes for the model and for the tokenizer that comes with it.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from outrider.errors import ModelFileError
from outrider.models.gguf import read_metadata
from outrider.models.opening import open_model
from outrider.tokenizer.build import tokenizer_from_folder, tokenizer_from_metadata

import tiny
from raw_gguf import ARRAY, FLOAT, STRING, U32, RawGGUF, RawTensor, small_llama, text, u32, u64

Change = Callable[[RawGGUF], object]
HUGE = [2**31, 2**40, 2**62, 2**63, 2**64 - 1]


def number(name: str, value: int) -> Change:
    return lambda raw: raw.set(f"llama.{name}", U32, u32(value))


def real(name: str, value: float) -> Change:
    return lambda raw: raw.set(f"llama.{name}", FLOAT, struct.pack("<f", value))


def word(name: str, value: bytes) -> Change:
    return lambda raw: raw.set(name, STRING, text(value))


def tensor(name: str, **changes: Any) -> Change:
    return lambda raw: raw.change(name, **changes)


def added(name: bytes, shape: tuple[int, ...] = (8,), **changes: Any) -> Change:
    return lambda raw: raw.tensors.append(RawTensor(name=name, shape=shape, **changes))


def attribute(name: str, value: object) -> Change:
    return lambda raw: setattr(raw, name, value)


def removed(name: str) -> Change:
    return lambda raw: raw.remove(name)


def array(name: str, kind: int, count: int, data: bytes = b"") -> Change:
    return lambda raw: raw.set(name, ARRAY, u32(kind) + u64(count) + data)


BROKEN_GGUF: list[tuple[Change, str]] = [
    (attribute("magic", b"GGML"), "not a GGUF file"),
    (attribute("version", 1), "version 1 cannot be read"),
    (attribute("version", 4), "version 4 cannot be read"),
    (attribute("order", ">"), "big-endian"),
    *[(attribute("num_keys", count), "do not fit") for count in HUGE],
    *[(attribute("num_tensors", count), "do not fit") for count in HUGE],
    (attribute("num_keys", 20), "ends within|unknown value type|not UTF-8"),
    (attribute("num_tensors", 13), "ends within|dimensions"),
    (attribute("alignment", 0), "general.alignment"),
    (attribute("alignment", 48), "general.alignment"),
    (attribute("alignment", 4), "general.alignment"),
    (attribute("alignment", 2**31), "general.alignment"),
    (word("general.alignment", b"32"), "general.alignment"),
    (lambda raw: raw.keys.append(raw.keys[0]), "the key 'general.architecture' is there twice"),
    (lambda raw: raw.keys.append((b"bad \xff key", U32, u32(1))), "not UTF-8"),
    (word("general.name", b"\xc3\x28"), "the key 'general.name' has text that is not UTF-8"),
    (lambda raw: raw.set("x", 13, u32(1)), "unknown value type 13"),
    (array("x", 9, 1), "array of the unknown value type 9"),
    (array("x", 77, 1), "array of the unknown value type 77"),
    *[(array("x", STRING, count), "cannot have") for count in HUGE],
    *[(array("x", FLOAT, count), "cannot have") for count in HUGE],
    (lambda raw: raw.keys.append((b"x", STRING, u64(2**63) + b"abc")), "ends within"),
    (lambda raw: raw.keys.append((b"x", STRING, u64(2**27) + b"abc")), "ends within"),
    (added(b"output.weight", (5, 8), kind=9), "type 9, which is unknown or cannot be decoded"),
    (tensor("blk.0.ffn_up.weight", kind=99), "type 99, which is unknown"),
    (tensor("blk.0.ffn_up.weight", kind=2), "impossible shape"),
    (tensor("blk.0.ffn_up.weight", shape=()), "0 dimensions"),
    (tensor("blk.0.ffn_up.weight", shape=(1, 1, 1, 8, 8)), "5 dimensions"),
    (tensor("blk.0.ffn_up.weight", shape=(0, 8)), "impossible shape"),
    (tensor("blk.0.ffn_up.weight", shape=(2**63, 2**63)), "truncated"),
    (tensor("blk.0.ffn_up.weight", shape=(2**32, 2**32)), "truncated"),  # 2**66 bytes: 0 in 64 bits
    (tensor("blk.0.ffn_up.weight", offset=32 * 10**6), "truncated"),
    (tensor("blk.0.ffn_up.weight", offset=2**64 - 32), "truncated|overlaps"),
    (tensor("blk.0.ffn_up.weight", offset=0), "overlaps"),
    (tensor("blk.0.ffn_up.weight", offset=33), "not at a multiple"),
    (added(b"blk.0.ffn_up.weight", (8, 8)), "'blk.0.ffn_up.weight' is there twice"),
    (added(b"blk.\xff", (8, 8)), "not UTF-8"),
    (removed("general.architecture"), "general.architecture is missing"),
    (word("general.architecture", b"gpt-neo"), "the architecture 'gpt-neo' cannot be read"),
    (lambda raw: raw.set("general.architecture", U32, u32(3)), "must be a text"),
    (removed("llama.block_count"), "llama.block_count is missing"),
    (removed("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon is missing"),
    (word("llama.block_count", b"1"), "must be a whole number"),
    (real("block_count", 1.0), "must be a whole number"),
    (number("block_count", 0), "between 1 and"),
    (number("block_count", 2**32 - 1), "between 1 and"),
    (number("block_count", 2), "blk.1.attn_norm.weight is missing"),
    (number("attention.head_count", 0), "between 1 and"),
    (number("attention.head_count", 3), "cannot be divided"),
    (number("attention.head_count_kv", 0), "between 1 and"),
    (number("attention.head_count_kv", 3), "cannot share"),
    (number("attention.head_count", 8), r"shape|even"),
    (number("attention.key_length", 2**31), "between 1 and"),
    (number("attention.value_length", 2), "differs"),
    (number("embedding_length", 16), "shape"),
    (number("embedding_length", 0), "between 1 and"),
    (number("feed_forward_length", 16), "has shape"),
    (number("context_length", 0), "between 2 and"),
    (number("context_length", 1), "between 2 and"),
    (real("attention.layer_norm_rms_epsilon", float("nan")), "between"),
    (real("rope.freq_base", 0.0), "between"),
    (real("rope.freq_base", float("inf")), "between"),
    (number("rope.dimension_count", 3), "even"),
    (number("rope.dimension_count", 6), "between 1 and 4"),
    (word("llama.rope.scaling.type", b"spiral"), "'spiral', which is unknown"),
    (number("expert_count", 8), "llama.expert_count is set"),
    (word("llama.rope.scaling.type", b"longrope"), "rope_factors_short.weight is missing"),
    (added(b"rope_factors_long.weight", (2,)), "rope_factors_short.weight is missing"),
    (number("attention.key_length", 5), "even number of dimensions, got 5"),
    (added(b"blk.0.attn_q.bias"), "blk.0.attn_k.bias is missing"),
    (added(b"blk.0.attn_v.bias", (4,)), "blk.0.attn_q.bias is missing"),
    (added(b"blk.0.attn_k_norm.weight", (4,)), "blk.0.attn_q_norm.weight is missing"),
    (added(b"rope_freqs.weight", (3,)), "rope_freqs.weight must be 2 F32 values"),
    (added(b"rope_freqs.weight", (2,), kind=1), "rope_freqs.weight must be 2 F32 values"),
    (added(b"blk.0.attn_output.bias"), "'blk.0.attn_output.bias' does not belong"),
    (added(b"blk.0.ffn_gate_exps.weight"), "does not belong"),
    (added(b"output.weight", (5, 16)), "output.weight has shape"),
    (tensor("blk.0.attn_k.weight", shape=(8, 8)), r"blk.0.attn_k.weight has shape \[8, 8\], the model needs \[4, 8\]"),
    (tensor("token_embd.weight", shape=(8,)), "token_embd.weight has shape"),
    (lambda raw: raw.set("tokenizer.ggml.eos_token_id", U32, u32(5)), "between 0 and 4"),
    (word("tokenizer.ggml.eos_token_id", b"</s>"), "must be a whole number"),
    # Without a gate, gate and up would be one matrix.
    *[(removed(one.name.decode()), f"{one.name.decode()} is missing|needs .16, 8.") for one in small_llama().tensors],
    (added(b"x" * 129), "has 129 characters"),
]


@pytest.mark.parametrize(("change", "reason"), BROKEN_GGUF)
def test_broken_gguf(change: Change, reason: str, tmp_path: Path) -> None:
    raw = small_llama()
    change(raw)
    refused(tmp_path / "model.gguf", raw.build(), reason)


def test_a_gguf_file_cut_anywhere(tmp_path: Path) -> None:
    whole = small_llama().build()
    header = len(small_llama().header())
    for length in [*range(header), *range(header, len(whole), 11), len(whole) - 1]:
        refused(tmp_path / "model.gguf", whole[:length], "ends within|fit|truncated|not a GGUF|empty|cannot have")
    (tmp_path / "model.gguf").write_bytes(whole)
    open_model(tmp_path / "model.gguf")


def test_things_that_are_no_model(tmp_path: Path) -> None:
    refused(tmp_path / "model.gguf", b"", "empty")
    refused(tmp_path / "model.bin", b"\x80\x02}q\x00.", "not a GGUF file")
    with pytest.raises(ModelFileError, match="no such file"):
        open_model(tmp_path / "nothing")
    refused(tmp_path, None, "config.json: the file is missing")


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.tiny("llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1)


BROKEN_CONFIG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": None}, "model_type is missing"),
    ({"model_type": 3}, "must be a text"),
    ({"model_type": "bert"}, "'bert' cannot be read.*--backend hf"),
    ({"hidden_act": "gelu"}, "'gelu' cannot be computed.*--backend hf"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised.*--backend hf"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "16"}, "must be a whole number"),
    ({"hidden_size": True}, "must be a whole number"),
    ({"hidden_size": 10**400}, "between 1 and"),
    ({"hidden_size": 32}, "has shape"),
    ({"num_attention_heads": 0}, "between 1 and"),
    ({"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": None}, "cannot be divided"),
    ({"num_key_value_heads": 3}, "cannot share"),
    ({"head_dim": 5}, "even number of dimensions, got 5.*--backend hf"),
    ({"num_hidden_layers": 2}, "blk.1.attn_norm.weight is missing"),
    ({"num_hidden_layers": 10**9}, "between 1 and"),
    ({"rms_norm_eps": float("nan")}, "between"),
    ({"rms_norm_eps": [1e-5]}, "must be a number"),
    ({"vocab_size": 100}, "has shape"),
    ({"tie_word_embeddings": "no"}, "true or false"),
    ({"max_position_embeddings": 0}, "between 2 and"),
    ({"max_position_embeddings": 1}, "between 2 and"),
    ({"eos_token_id": 101}, "between 0 and 100"),
    ({"eos_token_id": [2, -1]}, "between 0 and 100"),
    ({"eos_token_id": "</s>"}, "must be a whole number"),
    ({"rope_parameters": 4}, "one set of keys"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of keys"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' cannot be computed.*--backend hf"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "between"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "between"),
    ({"rope_parameters": {"partial_rotary_factor": 0.01}}, "even number"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "must have 2 entries"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, -1.0]}}, "positive numbers"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 1e-300]}}, "positive numbers"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 1e300]}}, "positive numbers"),
    ({"rope_scaling": 4}, "one set of keys"),
    (
        {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
        "must be below",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), BROKEN_CONFIG)
def test_broken_config(changes: dict[str, Any], reason: str, llama: Any, tmp_path: Path) -> None:
    config = json.loads((tiny.save_folder(llama, tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    refused(tmp_path, None, reason)


def test_broken_json(llama: Any, tmp_path: Path) -> None:
    tiny.save_folder(llama, tmp_path)
    long = b'{"a": ' + b"9" * 5000 + b"}"
    for content in (b"", b"{", b"\xff\xfe", b"[" * 200_000, long, b"[]", b"null", b'{"a": "\\ud800"}'):
        (tmp_path / "config.json").write_bytes(content)
        refused(tmp_path, None, "not valid JSON|must be a JSON object|cannot be read")


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize(
    ("family", "parts"), [("qwen2", "q_proj.bias k_proj.bias v_proj.bias"), ("qwen3", "q_norm k_norm")]
)
def test_biases_and_head_norms_come_together(family: str, parts: str, form: str, tmp_path: Path) -> None:
    """One that is missing in one layer is named, and so is the first when all are."""
    names = parts.split()
    for gone in ([f"layers.1.self_attn.{name}" for name in names[-1:]], [f"self_attn.{name}" for name in names]):
        model = tiny.tiny(family)
        kept = {name: value for name, value in model.state_dict().items() if not any(one in name for one in gone)}
        model.state_dict = lambda kept=kept: kept
        path = tmp_path / str(len(gone))
        if form == "folder":
            model.save_pretrained(path, state_dict=kept)
        else:
            tiny.save_gguf(model, path)
        layer, part = (1, names[-1]) if len(gone) == 1 else (0, names[0])
        short = {"bias": f"attn_{part[0]}.bias"}.get(part.rpartition(".")[2], f"attn_{part[0]}_norm.weight")
        refused(path, None, f"blk.{layer}.{short} is missing")


def test_a_mamba_file_whose_convolution_has_no_bias(tmp_path: Path) -> None:
    path = tiny.save_gguf(tiny.tiny("mamba", use_conv_bias=False), tmp_path / "model.gguf")
    refused(path, None, r"no bias \(ssm_conv1d.bias\), and such models cannot be read$")


def test_tensors_a_folder_should_not_have(llama: Any, tmp_path: Path) -> None:
    biased = tiny.tiny("llama", attention_bias=True)
    refused(tiny.save_folder(biased, tmp_path / "attention"), None, "o_proj.bias.*--backend hf")
    biased = tiny.tiny("llama", mlp_bias=True)
    refused(tiny.save_folder(biased, tmp_path / "mlp"), None, "mlp.*bias.*--backend hf")
    whole = tiny.save_folder(llama.to(dtype=None), tmp_path / "whole")
    config = json.loads((whole / "config.json").read_text())
    for name, changes, reason in (
        ("phi3", {"model_type": "phi3"}, None),
        ("mamba", {"model_type": "mamba", "state_size": 4, "conv_kernel": 4, "layer_norm_epsilon": 1e-5}, "not belong"),
    ):
        (whole / "config.json").write_text(json.dumps(config | changes))
        if reason is None:  # separate projections are as good as fused ones
            assert open_model(whole).spec.family == name
        else:
            refused(whole, None, reason)


def test_integer_weights(llama: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny.save_folder(llama, tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"].char()
    save_file(weights, path)
    refused(tmp_path, None, "has the type I8, only floating point")


def test_broken_shards(llama: Any, tmp_path: Path) -> None:
    tiny.save_folder(llama, tmp_path, max_shard_size="4KB")
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for weight_map, reason in (
        (None, "weight_map must give"),
        ({}, "weight_map must give"),
        ({"a": 3}, "weight_map must give"),
        (good["weight_map"] | {"a": "model-9.safetensors"}, "model-9.safetensors is missing"),
        (good["weight_map"] | {"a": "../x.safetensors"}, "is not the name"),
        (good["weight_map"] | {"a": "/etc/x.safetensors"}, "is not the name"),
        (good["weight_map"] | {"a": "x\0.safetensors"}, "is not the name"),
        (good["weight_map"] | {"a": "x" * 5000 + ".safetensors"}, "cannot be opened|missing|is not the name"),
        (good["weight_map"] | {"a": "pytorch_model.bin"}, "is not the name"),
    ):
        index.write_text(json.dumps(good | {"weight_map": weight_map}))
        refused(tmp_path, None, reason)
    left = {name: shard for name, shard in good["weight_map"].items() if "-00001-" not in shard}
    index.write_text(json.dumps({"weight_map": left}))
    refused(tmp_path, None, "is missing")


def test_pickles_are_not_read(llama: Any, tmp_path: Path) -> None:
    weights = tiny.save_folder(llama, tmp_path) / "model.safetensors"
    weights.rename(tmp_path / "pytorch_model.bin")
    refused(tmp_path, None, "never executed; convert")
    (tmp_path / "pytorch_model.bin").unlink()
    refused(tmp_path, None, "neither model.safetensors")


def test_a_damaged_safetensors_header(llama: Any, tmp_path: Path) -> None:
    path = tiny.save_folder(llama, tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    for content in (b"", whole[:7], whole[: 8 + length], whole[:-1], u64(2**60) + whole[8:], u64(3) + whole[8:]):
        path.write_bytes(content)
        refused(tmp_path, None, "damaged")
    for cut in range(0, length, 23):
        path.write_bytes(whole[: 8 + cut])
        refused(tmp_path, None, "damaged")


def with_tokenizer(kind: str) -> RawGGUF:
    """The small model, with a vocabulary of five tokens."""
    raw = small_llama()
    if kind == "none":
        return raw
    for name, value in (("model", kind), ("pre", "default")):
        raw.set(f"tokenizer.ggml.{name}", STRING, text(value.encode()))
    raw.set("tokenizer.chat_template", STRING, text(b"{{ bos_token }}{{ messages[0].content }}"))
    for name, words in (("tokens", b"<s> a b ab </s>"), ("merges", b"a\0b")):
        pieces = [word.replace(b"\0", b" ") for word in words.split()]
        raw.set(f"tokenizer.ggml.{name}", ARRAY, u32(STRING) + u64(len(pieces)) + b"".join(map(text, pieces)))
    raw.set("tokenizer.ggml.token_type", ARRAY, u32(5) + u64(5) + struct.pack("<5i", 3, 1, 1, 1, 3))
    for name, token in (("bos", 0), ("eos", 4), ("unknown", 0)):
        raw.set(f"tokenizer.ggml.{name}_token_id", U32, u32(token))
    if kind == "llama":
        raw.remove("tokenizer.ggml.merges")
        raw.set("tokenizer.ggml.scores", ARRAY, u32(FLOAT) + u64(5) + struct.pack("<5f", 0, -2, -3, -1, 0))
    return raw


@pytest.mark.parametrize("kind", ["none", "gpt2", "llama"])
def test_mutated_gguf_files(kind: str, tmp_path: Path) -> None:
    chance = random.Random(kind)
    raw = with_tokenizer(kind)
    whole, header = raw.build(), len(raw.header())
    path, survivors = tmp_path / "model.gguf", 0
    path.write_bytes(whole)
    assert survives(path, chance, tokenizer=kind != "none")
    tracemalloc.start()
    for _ in range(1000):
        path.write_bytes(mutated(whole, header, chance))
        survivors += survives(path, chance, tokenizer=kind != "none")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 50 < survivors < 950
    assert peak < 30e6


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2, "ab": 3, "\u0120": 4}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    declared = {"5": {"content": "<new>", "special": False, "rstrip": True}}
    template = [{"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}]
    config = {"bos_token": "<s>", "added_tokens_decoder": declared, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "extra_special_tokens": {"r": "<r>"}}))


@pytest.mark.parametrize("part", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_mutated_folders(part: str, llama: Any, tmp_path: Path) -> None:
    chance = random.Random(part)
    save_tokenizer(tiny.save_folder(llama, tmp_path))
    assert survives(tmp_path, chance, tokenizer=True)
    whole = (tmp_path / part).read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0] if part == "model.safetensors" else len(whole)
    survivors = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(500):
        content = mutated(whole, header, chance)
        if part.endswith(".json") and turn % 2:
            change = mutated_config if part == "config.json" else mutated_value
            content = json.dumps(change(json.loads(whole), chance)).encode()
        (tmp_path / part).write_bytes(content)
        survivors += survives(tmp_path, chance, tokenizer="tokenizer" in part)
    assert 25 < survivors < 475
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def refused(path: Path, content: bytes | None, reason: str) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelFileError, match=reason) as caught:
        open_model(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def survives(path: Path, chance: random.Random, *, tokenizer: bool = False) -> bool:
    """Whether the file can still be opened and read. Anything but a ModelFileError fails the test."""
    try:
        if tokenizer:
            use_tokenizer(path)
        file = open_model(path)
        for name in chance.sample(sorted(file.shapes), 3):
            file.read(name)
    except ModelFileError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error) and len(str(error)) < 600
        return False
    return True


def use_tokenizer(path: Path) -> None:
    """Everything but chatting: what a template says of the messages is not the file's fault alone."""
    if path.is_dir():
        tokenizer = tokenizer_from_folder(path)
    else:
        tokenizer = tokenizer_from_metadata(read_metadata(path), path)
    tokens = tokenizer.encode("ab <s>\u00e9") + tokenizer.encode("a", add_special=False)
    tokenizer.decode(tokens)
    for token in range(8):
        tokenizer.token_bytes(token)
    if tokenizer.has_chat:
        assert tokenizer.template


def mutated(whole: bytes, header: int, chance: random.Random) -> bytes:
    """Bytes flipped, cut out, repeated, inserted, or numbers overwritten; mostly within the header."""
    data = bytearray(whole)
    for _ in range(chance.choice([1, 1, 2, 4])):
        size = max(1, min(header, len(data)))
        start = chance.randrange(size if chance.random() < 0.8 else max(1, len(data)))
        kind = chance.randrange(6)
        if kind == 0:
            data[start : start + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            data[start : start + 1] = bytes([data[start] ^ (1 << chance.randrange(8)) if start < len(data) else 0])
        elif kind == 2:
            del data[start : start + chance.choice([1, 4, 8, 100, 10**6])]
        elif kind == 3:
            data[start:start] = chance.randbytes(chance.choice([1, 4, 8, 100]))
        elif kind == 4:
            value = chance.choice([0, 1, 2, 3, 255, 2**16, 2**31, 2**32 - 1, *HUGE])
            piece = struct.pack("<Q", value)[: chance.choice([4, 8])]
            data[start : start + len(piece)] = piece
        else:
            data[start:start] = data[start : start + 64]
    return bytes(data)


def mutated_value(value: Any, chance: random.Random) -> Any:
    """One entry somewhere inside replaced or taken away."""
    odd = [None, True, 0, -1, 2**32 - 1, 2**63, 1.5, "", "x", "<s>", "\ud800", "\u00e9", [], ["a"], {}, {"a": 1}]
    at, keys = value, list(value)
    while True:
        key = chance.choice(keys)
        inner = at[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.25:
            break
        at, keys = inner, list(inner) if isinstance(inner, dict) else list(range(len(inner)))
    if chance.random() < 0.2:
        del at[key]
    else:
        at[key] = chance.choice(odd)
    return value


def mutated_config(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    values = [None, True, 0, 1, -1, 2**40, 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "auto", [], [1], {}]
    keys = ["sliding_window", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings", *config]
    names = ["mistral", "qwen2", "qwen3", "phi3", "mamba", "llama"]
    for _ in range(chance.choice([1, 2, 3])):
        key = chance.choice(keys)
        if chance.random() < 0.2:
            config.pop(key, None)
        elif key == "model_type" or chance.random() < 0.1:
            config["model_type"] = chance.choice(names)
        elif key.startswith("rope") and chance.random() < 0.8:
            kind = chance.choice(["default", "linear", "llama3", "yarn", "longrope", "dynamic"])
            inner = [
                "factor",
                "rope_theta",
                "low_freq_factor",
                "high_freq_factor",
                "short_factor",
                "beta_fast",
                "mscale",
            ]
            config[key] = {"rope_type": kind, **{name: chance.choice(values) for name in chance.sample(inner, 3)}}
        else:
            config[key] = chance.choice(values)
    return config
