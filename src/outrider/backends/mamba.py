"""Mamba-1 in torch: float32 on the CPU, bfloat16 weights with float32 state on a GPU.

One pass takes all spans at once: each projection is one matrix product over every token fed. The convolution and the
scan run over spans of equal length together, one multiply-add per token. States of the last `max_rewind` tokens are
kept (`kv/recurrent.py`), so a refused draft costs nothing and leaves no trace. Trees are refused: a recurrent state has
one past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.backends.base import Backend, ModelInfo, Paths, Spans, State
from outrider.backends.checks import check_chains, check_rewind, check_spans
from outrider.backends.torch_common import array_of, sampling_for
from outrider.checks import check_whole
from outrider.errors import ConfigError, ModelFileError
from outrider.kv.recurrent import Reach, RecurrentStates
from outrider.models.base import MambaSpec, ModelFile, check_shapes
from outrider.types import Scores, Slot

SCAN_TOKENS = 32  # tokens of a span scanned at once: bounds the memory of their decays and states


@dataclass(frozen=True, slots=True)
class Layer:
    """One mixer's weights: matrices [outputs, inputs] in the compute type, the rest in float32."""

    norm: Tensor  # [width]
    into: Tensor  # [2 * inner, width]: the channels, then their gates
    kernel: Tensor  # [conv, inner]: what each of the last tokens counts
    kernel_bias: Tensor  # [inner]
    select: Tensor  # [dt_rank + 2 * state, inner]: step, what to write, what to read
    step: Tensor  # [inner, dt_rank]
    step_bias: Tensor  # [inner]
    decay: Tensor  # [inner, state], below zero
    skip: Tensor  # [inner]
    out: Tensor  # [width, inner]


@dataclass(frozen=True, slots=True)
class Group:
    """Spans of equal length, side by side in the pass."""

    rows: slice  # of the pass
    num_spans: int
    reach: Reach

    def of(self, pass_rows: Tensor) -> Tensor:
        """[N, M] -> [S, T, M]"""
        return pass_rows[self.rows].view(self.num_spans, -1, pass_rows.shape[1])


class MambaBackend(Backend):
    """`context` may go beyond what the model was trained on. `max_slots` sequences may be open at once; each keeps
    `max_rewind` + 1 states."""

    fingerprint: str | None = None  # of the weights, where they came from a file

    def __init__(
        self,
        file: ModelFile,
        *,
        vocab_size: int | None = None,
        device: str = "cpu",
        context: int | None = None,
        max_rewind: int = 8,
        max_slots: int = 64,
    ) -> None:
        spec = file.spec
        if not isinstance(spec, MambaSpec):
            raise ModelFileError(f"{file.path} is a {spec.family} model; this backend runs Mamba")
        check_whole(max_rewind, "max_rewind", 0, ConfigError)
        check_whole(max_slots, "max_slots", 1, ConfigError)
        check_shapes(file)
        self.spec = spec
        self.info = ModelInfo(
            name=file.name,
            vocab_size=spec.num_columns if vocab_size is None else vocab_size,
            num_columns=spec.num_columns,
            context=spec.context if context is None else context,
            eos_ids=file.eos_ids,
            max_rewind=max_rewind,
            num_hidden=spec.num_layers + 1,
        )
        self._device = torch.device(device)
        self._dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        self.ops = sampling_for(self._device)
        self._embedding = self._matrix(file, "token_embd.weight")
        self._output = self._embedding if spec.tied else self._matrix(file, "output.weight")
        self._output_norm = self._vector(file, "output_norm.weight")
        self._layers = [self._layer(file, f"blk.{index}") for index in range(spec.num_layers)]
        self.states = RecurrentStates(
            num_layers=spec.num_layers,
            inner=spec.inner,
            state=spec.state,
            conv=spec.conv,
            max_rewind=max_rewind,
            max_slots=max_slots,
            device=self._device,
        )

    @property
    def num_slots(self) -> int:
        return self.states.num_slots

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        return self.states.open()

    def length(self, slot: Slot) -> int:
        return self.states.length(slot)

    @torch.inference_mode()
    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        check_spans(spans, hidden, self.info, self.states.length)
        order = sorted(range(len(spans.slots)), key=spans.counts.__getitem__)  # equal lengths side by side
        begins = list(accumulate(spans.counts, initial=0))
        fed = [at for index in order for at in range(begins[index], begins[index + 1])]  # pass row -> token
        moved = torch.tensor(fed, device=self._device)
        tokens = torch.as_tensor(spans.tokens, device=self._device)[moved]
        places = torch.argsort(moved)  # token -> pass row
        wanted = [at for end, rows in zip(begins[1:], spans.rows, strict=True) for at in range(end - rows, end)]

        groups = self._groups(spans, order)
        self.states.begin(spans.slots, spans.counts)
        x = self._embedding[tokens].float()  # [N, width]; the residual stream stays float32
        given = {0: x[places]} if 0 in hidden else {}
        for index, layer in enumerate(self._layers):
            x = x + self._mix(index, layer, x, groups)
            if index + 1 in hidden:
                given[index + 1] = x[places]
        logits = self._project(self._norm(x[places[wanted]], self._output_norm), self._output)
        self.states.advance(spans.slots, spans.counts)
        return Scores(
            [rows for rows in spans.rows if rows],
            array_of(logits),
            hidden={index: array_of(states) for index, states in given.items()},
        )

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        check_chains(paths, self.info)
        for slot, length in zip(slots, lengths, strict=True):
            self.rewind(slot, length)

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        pass  # a state is of one sequence: there is no part of it that another could share

    def rewind(self, slot: Slot, length: int) -> None:
        check_rewind(slot, self.states.length(slot), length, self.states.oldest(slot))
        self.states.set_length(slot, length)

    def fork(self, slot: Slot) -> Slot | None:
        return self.states.fork(slot)

    def close(self, slot: Slot) -> None:
        self.states.close(slot)

    def save(self, slot: Slot) -> State:
        inputs, states = self.states.export(slot)
        return {"length": self.states.length(slot), "inputs": inputs, "states": states}

    def load(self, state: State) -> Slot | None:
        return self.states.adopt(state["length"], state["inputs"], state["states"])

    def _groups(self, spans: Spans, order: Sequence[int]) -> list[Group]:
        groups, begin = [], 0
        for count, members in groupby(order, key=spans.counts.__getitem__):
            slots = [spans.slots[index] for index in members]
            end = begin + count * len(slots)
            groups.append(Group(slice(begin, end), len(slots), self.states.reach(slots, count)))
            begin = end
        return groups

    def _mix(self, index: int, layer: Layer, x: Tensor, groups: Sequence[Group]) -> Tensor:
        """What a layer adds to the residual stream. [N, width] -> [N, width]"""
        spec = self.spec
        channels, gates = self._project(self._norm(x, layer.norm), layer.into).chunk(2, dim=-1)  # [N, inner] each
        channels = torch.cat([self._convolve(index, layer, group, group.of(channels)) for group in groups])
        selected = self._project(channels, layer.select)
        write, read = selected[:, spec.dt_rank : -spec.state], selected[:, -spec.state :]  # [N, state] each
        step = functional.softplus(self._project(selected[:, : spec.dt_rank], layer.step) + layer.step_bias)
        written = step * channels  # [N, inner], like step
        scanned = torch.cat([self._scan(index, layer, group, step, written, write, read) for group in groups])
        scanned.addcmul_(channels, layer.skip).mul_(functional.silu(gates))
        return self._project(scanned, layer.out)

    def _convolve(self, index: int, layer: Layer, group: Group, channels: Tensor) -> Tensor:
        """Each channel's last tokens, weighed. [S, T, inner] -> [S * T, inner]"""
        seen = torch.cat([self.states.inputs(index, group.reach), channels], dim=1)  # [S, conv - 1 + T, inner]
        count = channels.shape[1]
        mixed = torch.addcmul(layer.kernel_bias, seen[:, :count], layer.kernel[0])
        for back in range(1, self.spec.conv):
            mixed.addcmul_(seen[:, back : back + count], layer.kernel[back])
        self.states.store_inputs(index, group.reach, channels)
        return functional.silu(mixed).flatten(0, 1)

    def _scan(
        self, index: int, layer: Layer, group: Group, step: Tensor, written: Tensor, write: Tensor, read: Tensor
    ) -> Tensor:
        """state = exp(step * decay) * state + written * write; out = state . read. -> [S * T, inner]"""
        step, written, write, read = group.of(step), group.of(written), group.of(write), group.of(read)  # [S, T, ...]
        count, first_kept = step.shape[1], step.shape[1] - group.reach.num_states
        state = self.states.state(index, group.reach)  # [S, inner, state]
        out = torch.empty_like(step)
        kept = []
        for begin in range(0, count, SCAN_TOKENS):
            part = slice(begin, min(begin + SCAN_TOKENS, count))
            decays = (step[:, part, :, None] * layer.decay).exp_()  # [S, t, inner, state]
            states = written[:, part, :, None] * write[:, part, None, :]
            for after, decay in zip(states.unbind(1), decays.unbind(1), strict=True):
                state = after.addcmul_(decay, state)
            out[:, part] = (states @ read[:, part, :, None])[..., 0]
            if part.stop > first_kept:
                kept.append(states[:, max(0, first_kept - begin) :])
        self.states.store_states(index, group.reach, torch.cat(kept, dim=1))
        return out.flatten(0, 1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def _project(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Matrix product in the compute type, float32 on both sides of it."""
        return functional.linear(x.to(self._dtype), matrix).float()

    def _layer(self, file: ModelFile, prefix: str) -> Layer:
        return Layer(
            norm=self._vector(file, f"{prefix}.attn_norm.weight"),
            into=self._matrix(file, f"{prefix}.ssm_in.weight"),
            kernel=self._vector(file, f"{prefix}.ssm_conv1d.weight").T.contiguous(),
            kernel_bias=self._vector(file, f"{prefix}.ssm_conv1d.bias"),
            select=self._matrix(file, f"{prefix}.ssm_x.weight"),
            step=self._matrix(file, f"{prefix}.ssm_dt.weight"),
            step_bias=self._vector(file, f"{prefix}.ssm_dt.bias"),
            decay=self._vector(file, f"{prefix}.ssm_a"),
            skip=self._vector(file, f"{prefix}.ssm_d"),
            out=self._matrix(file, f"{prefix}.ssm_out.weight"),
        )

    def _matrix(self, file: ModelFile, name: str) -> Tensor:
        return _tensor(file.read(name)).to(self._device, self._dtype)

    def _vector(self, file: ModelFile, name: str) -> Tensor:
        """Small ones stay float32: they shape the state."""
        return _tensor(file.read(name)).to(self._device, torch.float32)


def _tensor(array: Any) -> Tensor:
    """A copy: a file's arrays may be read-only views of it."""
    return array.clone() if isinstance(array, Tensor) else torch.from_numpy(np.array(array))
