"""Medusa heads: what config.json and the tensors' names mean.

    Medusa       0.0.linear.weight, 0.0.linear.bias (block 0 of head 0), 0.1.weight (its matrix, behind the blocks)
    vLLM         blocks.0.layers.0.weight, lm_heads.0.weight; lm_head.weight or none with original_lm_head; token_map

Heads without a matrix of their own (Medusa's second version) use the target's. A file may hold more heads than its
config speaks of; all are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from outrider.errors import ModelFileError
from outrider.models.base import Shape
from outrider.models.facts import MAX_LAYERS, MAX_SIZE, Facts
from outrider.models.head_spec import IDS, NUMBER, OFFSETS, MedusaSpec, rename
from outrider.models.head_tensors import Tensors

_BLOCK = re.compile(rf"(?:{NUMBER}\.{NUMBER}\.linear|blocks\.{NUMBER}\.layers\.{NUMBER})\.(weight|bias)")
_OUTPUT = re.compile(rf"(?:{NUMBER}\.{NUMBER}|lm_heads\.{NUMBER})\.weight")
_TOP = {"lm_head.weight": "output.weight", "token_map": IDS, "d2t": OFFSETS}
_UNUSED = re.compile(r"t2d|embed_tokens\.weight")  # what d2t says already; what the target has


def read_medusa(facts: Facts, tensors: Tensors) -> tuple[MedusaSpec, dict[str, str]]:
    """The spec, and their name of each tensor by ours."""
    layers_key = "medusa_num_layers" if facts.has("medusa_num_layers") else "num_hidden_layers"
    heads_key = "medusa_num_heads" if facts.has("medusa_num_heads") else "num_heads"
    num_layers = facts.whole(layers_key, default=1, low=0, high=MAX_LAYERS)
    promised = facts.whole(heads_key, default=1, high=MAX_LAYERS)
    shared = facts.flag("original_lm_head", default=False)
    names = rename(tensors, lambda theirs: _short(theirs, num_layers, shared), _UNUSED)
    shapes = {ours: tensors.shapes[theirs] for ours, theirs in names.items()}
    num_heads = 1 + max((int(ours.split(".")[1]) for ours in names if ours.startswith("head.")), default=-1)
    if num_heads < promised:
        raise facts.fail(f"{heads_key} is {promised}, but the file holds {num_heads} heads; fetch it again")
    if IDS in names and OFFSETS in names:
        raise ModelFileError(f"{tensors.path}: token_map and d2t say the same in two ways; one must go")
    outputs = [ours for ours in names if ours.endswith("output.weight")]
    first = "head.0.block.0.weight" if num_layers or not outputs else outputs[0]
    for matrix in (first, *outputs):
        if len(shapes.get(matrix, ())) != 2 or not all(1 <= size <= MAX_SIZE for size in shapes[matrix]):
            raise ModelFileError(f"{tensors.path}: the tensor {matrix} is missing, or no matrix of a sane size")
    reduced = [shapes[name][0] for name in (IDS, OFFSETS) if shapes.get(name)]
    spec = MedusaSpec(
        num_heads=num_heads,
        num_layers=num_layers,
        width=shapes[first][1],
        output="shared" if "output.weight" in names else "own" if outputs else "target",
        num_columns=shapes[outputs[0]][0] if outputs else None,
        draft_vocab_size=reduced[0] if reduced else None,
    )
    return spec, names


def _short(theirs: str, num_layers: int, shared: bool) -> str | None:
    name = re.sub(r"^medusa_heads?\.", "", theirs)
    if found := _BLOCK.fullmatch(name):
        head, block, kind = [group for group in found.groups() if group is not None]
        return f"head.{head}.block.{block}.{kind}"
    if found := _OUTPUT.fullmatch(name):
        head, block, named = found.groups()
        if named == "0" and shared:  # vLLM stores the one matrix with the first head
            return "output.weight"
        if named is None and int(block) != num_layers:
            return None
        return f"head.{named or head}.output.weight"
    return _TOP.get(name)


def medusa_shapes(spec: MedusaSpec, present: Mapping[str, Shape]) -> dict[str, Shape]:
    """The tensors such a head must have; one bias wants all of them."""
    shapes: dict[str, Shape] = {}
    biased = any(name.endswith(".bias") for name in present)
    matrix = (spec.num_columns or 0, spec.width)
    for head in range(spec.num_heads):
        for block in range(spec.num_layers):
            shapes[f"head.{head}.block.{block}.weight"] = (spec.width, spec.width)
            if biased:
                shapes[f"head.{head}.block.{block}.bias"] = (spec.width,)
        if spec.output == "own":
            shapes[f"head.{head}.output.weight"] = matrix
    if spec.output == "shared":
        shapes["output.weight"] = matrix
    for name in (IDS, OFFSETS):
        if name in present:
            shapes[name] = (spec.draft_vocab_size or 0,)
    return shapes
