"""Small GGUF models of any shape and type with random weights, and walks through everything a backend can be asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from outrider.backends.base import Spans
from outrider.native.library import library
from outrider.types import Slot

Array = np.ndarray[Any, Any]
BY_BLOCK = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
BY_SUPER = ("Q4_K", "Q5_K", "Q6_K")
# Where the half-precision scale and minimum of a block stand, and the minimum that centres its values.
_HALVES = {"Q4_0": (0, None, 0.0), "Q5_0": (0, None, 0.0), "Q8_0": (0, None, 0.0), "Q6_K": (208, None, 0.0)}
_HALVES |= {"Q4_1": (0, 2, -7.5), "Q5_1": (0, 2, -15.5), "Q4_K": (0, 2, 7.5), "Q5_K": (0, 2, 15.5)}
_HALVES |= {"IQ4_NL": (0, None, 0.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model. `family` is GGUF's name of it; a mistral is a llama with a window."""

    family: str = "llama"
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary: int | None = None  # dimensions that turn; None: all
    ffn: int = 96
    layers: int = 2
    vocab: int = 101
    tied: bool = False
    window: int = 0
    slides: tuple[bool, ...] = ()  # which layers have the window; empty: all
    kinds: Sequence[str] = ("F32",)  # of matrices; several: each takes one by chance
    page_size: int = 16


def save_model(path: Path, shape: Shape, seed: int = 0, change: Callable[[str, Array], Array] | None = None) -> Path:
    """The model as a file. `change` gets each matrix as it is stored, by name, and returns what to store instead."""
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, shape.family)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.width)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(512)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.rotary or shape.head_dim)
    writer.add_rope_freq_base(1000.0)
    if shape.window:
        writer.add_sliding_window(shape.window)
        if shape.slides:
            writer.add_sliding_window_pattern(list(shape.slides))
    for name, size in _tensors(shape).items():
        if len(size) == 1:
            mean = 0.0 if name.endswith("bias") else 1.0
            writer.add_tensor(name, (mean + 0.1 * random.normal(size=size)).astype(np.float32))
            continue
        kind = str(random.choice(list(shape.kinds)))
        gain = 1.0 if name.startswith("token_embd") and not shape.tied else 2.0 if name.startswith("output") else 1.0
        raw = stored(kind, *size, gain / math.sqrt(size[1]), random)
        raw = raw if change is None else change(name, raw)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(kind: str, rows: int, columns: int, scale: float, random: np.random.Generator) -> Array:
    """A matrix of random bits whose values are about this large, as a file has it."""
    if kind in ("F32", "F16", "BF16"):
        values = (scale * random.normal(size=(rows, columns))).astype(np.float32)
        return quants.quantize(values, GGMLQuantizationType[kind])
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, size=(rows * columns // size, num_bytes), dtype=np.uint8)
    at, minimum_at, minimum = _HALVES[kind]
    d = random.uniform(0.5, 1.5, size=(len(blocks), 1))
    for factor in (1.0, None):  # once to see how large it is, once to make it right
        if factor is None:
            factor = scale / float(quants.dequantize(blocks[:512], GGMLQuantizationType[kind]).std())
        blocks[:, at : at + 2] = (factor * d).astype(np.float16).view(np.uint8)
        if minimum_at is not None:
            blocks[:, minimum_at : minimum_at + 2] = (factor * minimum * d).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab, shape.width)}
    tensors["output_norm.weight"] = (shape.width,)
    if not shape.tied:
        tensors["output.weight"] = (shape.vocab, shape.width)
    parts = {"attn_qkv": queries + 2 * keys} if shape.family == "phi3" else {}
    parts = parts or {"attn_q": queries, "attn_k": keys, "attn_v": keys}
    for index in range(shape.layers):
        layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (shape.width,), "ffn_norm.weight": (shape.width,)}
        layer |= {f"{name}.weight": (rows, shape.width) for name, rows in parts.items()}
        if shape.family == "qwen2":
            layer |= {f"{name}.bias": (rows,) for name, rows in parts.items()}
        if shape.family == "qwen3":
            layer |= {f"attn_{one}_norm.weight": (shape.head_dim,) for one in "qk"}
        layer["attn_output.weight"] = (shape.width, queries)
        if shape.family == "phi3":
            layer["ffn_up.weight"] = (2 * shape.ffn, shape.width)
        else:
            layer |= {f"ffn_{name}.weight": (shape.ffn, shape.width) for name in ("gate", "up")}
        layer["ffn_down.weight"] = (shape.width, shape.ffn)
        tensors |= {f"blk.{index}.{name}": size for name, size in layer.items()}
    return tensors


class Truth:
    """What follows a text, computed alone and at once. Rows and hidden states of every layer by the tokens so far."""

    def __init__(self, backend: Any, whole: Any = None) -> None:
        """whole: the model whose first layers `backend` is."""
        self._backend, self._whole = backend, whole or backend
        self._known: dict[tuple[int, ...], tuple[Array, dict[int, Array]]] = {}

    def after(self, tokens: Sequence[int]) -> tuple[Array, dict[int, Array]]:
        key = tuple(tokens)
        if key not in self._known:
            slot, layers = self._whole.open(), range(self._backend.info.num_hidden)
            scores = self._backend.score(Spans([slot], [0], [len(key)], [len(key)], np.array(key)), hidden=layers)
            for at in range(len(key)):
                states = {layer: np.asarray(scores.hidden[layer])[at] for layer in layers}
                self._known.setdefault(key[: at + 1], (np.asarray(scores.logits)[at], states))
            self._backend.close(slot)
            if self._whole is not self._backend:
                self._whole.close(slot)
        return self._known[key]


@dataclass(slots=True)
class Held:
    """A slot of a walk: what it holds, and the tree that hangs on it."""

    tokens: list[int]
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def text(self, node: int) -> list[int]:
        return self.tokens + [self.nodes[one] for one in self.path(node)]


Check = Callable[[str, Sequence[int], Array | None, Mapping[int, Array]], None]


class Walk:
    """Random passes and changes on a backend, a second model on its pages and its first layers. Everything that comes
    back is handed to `check`: who said it, after which text, the row if one was wanted, hidden states."""

    KINDS = ("rows of the target", "rows of the draft", "rows of the view", "prefix hits", "moved paths", "rewinds")
    KINDS += ("forks", "loads", "swaps", "trees fed on")
    MOST_SLOTS = 5

    def __init__(self, target: Any, draft: Any, check: Check, seed: int, *, threads: int = 3, most: int = 90) -> None:
        """most: tokens of a sequence."""
        self.target, self.draft, self.check, self.threads, self.most = target, draft, check, threads, most
        self.view = target.view(1)
        self.random = np.random.default_rng(seed)
        self.slots: dict[Slot, Held] = {}
        self.done: Counter[str] = Counter()  # what really happened

    def run(self, rounds: int) -> None:
        """Each round is all there is to do, some of it several times, in random order."""
        ops = [self.open, *[self.score] * 5, self.settle, self.settle, self.rewind, self.fork, self.close, self.save]
        ops += [self.swap, self.publish, self.publish, self.draft_reads, self.draft_reads, self.first_layers]
        for step in [step for _ in range(rounds) for step in self.random.permutation(len(ops))]:
            if self.random.random() < 0.2:
                library().outrider_set_threads(self.number(1, self.threads))
            if not self.slots:
                self.open()
            ops[step]()
            self.target.pages.check()
        while self.slots:
            self.close()
        library().outrider_set_threads(1)

    def number(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def some(self, count: int) -> list[int]:
        return self.random.integers(0, self.target.info.vocab_size, count).tolist()

    def pick(self, *, tree: bool | None = False, tokens: int = 0) -> Slot | None:
        fit = [slot for slot, one in self.slots.items() if tree is None or bool(one.nodes) == tree]
        fit = [slot for slot in fit if len(self.slots[slot].tokens) >= tokens]
        return fit[self.number(0, len(fit) - 1)] if fit else None

    def open(self, tokens: Sequence[int] = ()) -> None:
        slot = self.target.open(tokens, len(tokens) + 20) if len(self.slots) < self.MOST_SLOTS else None
        if slot is not None:
            self.slots[slot] = Held(list(tokens[: self.target.length(slot)]))
            self.done["prefix hits"] += bool(self.slots[slot].tokens)

    def score(self) -> None:
        """A mixed pass: chunks, single tokens, chains that are called trees, trees, more of earlier trees."""
        spans, texts = Spans([], [], [], [], np.empty(0)), []
        fed: list[int] = []
        for slot, one in self.slots.items():
            if self.random.random() < 0.3 or len(one.tokens) + len(one.nodes) > self.most - 20:
                continue
            start = len(one.tokens) + len(one.nodes)
            new, parents = self._span(one)
            if parents is not None:
                spans.parents = {**spans.parents, len(spans.slots): parents}
                one.nodes += new
                one.parents = list(parents)
                texts += [one.text(node) for node in range(len(one.nodes) - len(new), len(one.nodes))]
            else:
                texts += [one.tokens + new[: at + 1] for at in range(len(new))]
                one.tokens += new
            spans.slots.append(slot)
            spans.starts.append(start)
            spans.counts.append(len(new))
            spans.rows.append([0, self.number(0, len(new)), len(new)][self.number(0, 2)])
            fed += new
        if spans.slots:
            spans.tokens = np.array(fed)
            layers = [layer for layer in range(self.target.info.num_hidden) if self.random.random() < 0.3]
            self._compare("target", self.target.score(spans, hidden=layers), spans, texts)

    def _span(self, one: Held) -> tuple[list[int], list[int] | None]:
        """New tokens; for a tree, the parents of all its nodes so far."""
        kind = self.number(0, 4)
        self.done["trees fed on"] += bool(one.nodes)
        if one.nodes or kind == 0:
            new = self.some(self.number(1, 5))
            first = len(one.nodes)
            return new, one.parents + [self.number(-1, node - 1) for node in range(first, first + len(new))]
        count = [1, 1, self.number(2, 6), self.number(2, 24)][kind - 1]
        return self.some(count), [*range(-1, count - 1)] if kind == 3 else None

    def _compare(self, who: str, scores: Any, spans: Spans, texts: Sequence[Sequence[int]]) -> None:
        assert scores.counts == [rows for rows in spans.rows if rows]
        at, row = 0, 0
        for count, rows in zip(spans.counts, spans.rows, strict=True):
            for node in range(count):
                wanted = node >= count - rows
                states = {layer: state[at] for layer, state in scores.hidden.items()}
                self.check(who, texts[at], scores.logits[row] if wanted else None, states)
                row, at = row + wanted, at + 1
        assert row == len(scores.logits)
        self.done[f"rows of the {who}"] += row

    def settle(self) -> None:
        """A tree's round is over: one path stays, or nothing."""
        slot = self.pick(tree=True)
        if slot is None:
            return
        one = self.slots[slot]
        path = one.path(self.number(-1, len(one.nodes) - 1))
        self._draft_back(slot, len(one.tokens))
        start = len(one.tokens)
        self.target.keep([slot], [start + len(path)], {slot: [start + node for node in path]} if path else None)
        self.slots[slot] = Held(one.tokens + [one.nodes[node] for node in path])
        self.done["moved paths"] += path != [*range(len(path))]

    def rewind(self) -> None:
        slot = self.pick(tokens=1)
        if slot is not None:
            one = self.slots[slot]
            del one.tokens[self.number(len(one.tokens) // 2, len(one.tokens)) :]
            self._draft_back(slot, len(one.tokens))
            self.target.rewind(slot, len(one.tokens))
            self.done["rewinds"] += 1

    def fork(self) -> None:
        slot = self.pick()
        other = self.target.fork(slot) if slot is not None and len(self.slots) < self.MOST_SLOTS else None
        if slot is not None and other is not None:
            self.slots[other] = Held(list(self.slots[slot].tokens))
            self.done["forks"] += 1

    def close(self) -> None:
        slot = self.pick(tree=None)
        if slot is not None:
            self.target.close(slot)
            del self.slots[slot]

    def save(self) -> None:
        slot = self.pick()
        if slot is not None:
            one, state = self.slots.pop(slot), self.target.save(slot)
            self.target.close(slot)
            self._again(self.target.load(state), one)
            self.done["loads"] += bool(one.tokens)

    def swap(self) -> None:
        slot = self.pick(tokens=2)
        if slot is not None:
            one, state = self.slots.pop(slot), self.target.swap_out(slot)
            self.target.close(slot)
            self._again(self.target.swap_in(state, one.tokens, len(one.tokens) + 20), one)
            self.done["swaps"] += 1

    def _again(self, slot: Slot | None, one: Held) -> None:
        assert slot is not None, "there was room for it before"
        self.slots[slot] = Held(one.tokens[: self.target.length(slot)])

    def publish(self) -> None:
        """A later sequence begins as this one did."""
        slot = self.pick(tokens=self.target.pages.page_size)
        if slot is not None:
            tokens = list(self.slots[slot].tokens)
            self.target.publish(slot, tokens)
            if len(self.slots) == self.MOST_SLOTS:
                self.close()
            self.open([*tokens, *self.some(1)])

    def draft_reads(self) -> None:
        slot = self.pick(tokens=1)
        if slot is None:
            return
        one, start = self.slots[slot], self.draft.length(slot)
        new = one.tokens[start : start + self.number(1, 9)]
        if new:
            spans = Spans([slot], [start], [len(new)], [len(new)], np.array(new))
            texts = [one.tokens[: start + at + 1] for at in range(len(new))]
            self._compare("draft", self.draft.score(spans), spans, texts)

    def first_layers(self) -> None:
        """They guess ahead of the target, which then writes over it."""
        slot = self.pick()
        if slot is None:
            return
        one = self.slots[slot]
        start, ahead = len(one.tokens), Held(list(one.tokens))
        for _ in range(self.number(1, 3)):
            new = self.some(self.number(1, 3))
            first = len(ahead.nodes)
            ahead.parents += [self.number(-1, node - 1) for node in range(first, first + len(new))]
            ahead.nodes += new
            spans = Spans([slot], [start + first], [len(new)], [len(new)], np.array(new), {0: ahead.parents})
            texts = [ahead.text(node) for node in range(first, len(ahead.nodes))]
            self._compare("view", self.view.score(spans), spans, texts)
        self.view.close(slot)

    def _draft_back(self, slot: Slot, length: int) -> None:
        if self.draft.length(slot) > length:
            self.draft.rewind(slot, length)


def all_shapes() -> Iterator[tuple[str, Shape]]:
    """Families with odd sizes: heads of 4 to 80, groups of 1 to 8, pages of 1 to 24, no vocabulary of whole tiles."""
    yield "llama", Shape(heads=4, kv_heads=4)
    yield "llama-odd", Shape(width=18, heads=3, kv_heads=1, head_dim=6, ffn=50, vocab=67, page_size=4)
    yield "mistral", Shape(width=33, heads=5, kv_heads=1, head_dim=4, ffn=31, window=7, page_size=1)
    yield "mistral-pattern", Shape(heads=8, kv_heads=1, layers=3, window=5, slides=(True, False, True), page_size=4)
    yield "qwen2", Shape(family="qwen2", width=50, heads=8, kv_heads=1, head_dim=20, page_size=24)
    yield "qwen2-tied", Shape(family="qwen2", heads=6, kv_heads=2, tied=True, vocab=49)
    yield "qwen3", Shape(family="qwen3", heads=3, kv_heads=3, head_dim=80, tied=True, page_size=24)
    yield "phi3", Shape(family="phi3", width=60, heads=5, kv_heads=1, head_dim=20, rotary=12, page_size=4)
    yield "phi3-wide", Shape(family="phi3", heads=16, kv_heads=2, head_dim=80, ffn=70)
