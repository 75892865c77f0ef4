"""The one target distribution: rows of logits in, rows of shaped logits out. Used for plain decoding, acceptance,
replacement, bonus and draft rows alike; nothing else in the project touches a distribution.

Shaped logits are log-probabilities up to a constant per row, minus infinity where a token is ruled out. Every step
runs only for the rows that ask for it. Written against the array API standard: xp is numpy or torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import is_numpy_namespace

from outrider.errors import BackendError, OutriderError, RequestError
from outrider.sampling.noise import PRUNED, Stream
from outrider.types import Array, Job, SamplingParams

# row -> its job, and the drafted tokens between the job's own tokens and this row; asked only where a control needs it
History = Callable[[int], tuple[Job, Sequence[int]]]


@dataclass(slots=True)
class Controls:
    """The settings of some rows as arrays, one entry per row; None where no row needs the step."""

    words: Array  # [2, R] int32: the seed
    sampled: Array | None  # [R, 1] 1.0 where noise is added, 0.0 where greedy; None: no row is greedy
    all_greedy: bool
    weighed: list[bool]  # jobs whose draft probabilities the judge will ask for: `rejection`, not greedy
    draft_stream: Array  # [B] int32: the noise a job's draft token is drawn with
    processed: list[int]  # rows with logits processors
    penalised: list[int]  # rows with penalties
    constrained: list[int]  # rows with a grammar
    held: list[int]  # rows of requests that may not stop before a certain length
    bias: tuple[Array, Array, Array] | None = None  # rows, ids, values: [M] each
    temperature: Array | None = None  # [R, 1]
    ranked: tuple[Array, Array, Array] | None = None  # rows [r], top_k [r, 1], top_p [r, 1]
    min_p: Array | None = None  # [R, 1] log of min_p
    typical: tuple[Array, Array] | None = None  # rows [r], typical_p [r, 1]

    @property
    def changes_logits(self) -> bool:
        return bool(self.processed or self.penalised or self.bias or self.constrained or self.held)


def is_simple(job: Job) -> bool:
    """Whether its rows need nothing but temperature and min_p: neither a row as a whole nor what came before."""
    params = job.params
    if params.processors or params.penalised or params.logit_bias or params.banned:
        return False
    if job.grammar is not None or job.min_length > 0:
        return False
    return params.temperature == 0.0 or (params.top_k is None and params.top_p >= 1.0 and params.typical_p >= 1.0)


def build_controls(xp: Any, device: Any, jobs: Sequence[Job], counts: Sequence[int]) -> Controls:
    """Controls for `counts[b]` rows of each job b. Computed per job, then repeated: a changing batch is built anew."""
    params = [job.params for job in jobs]
    distinct = list({id(p): p for p in params}.values())
    owner = np.repeat(np.arange(len(jobs)), counts)  # [R] the job of each row

    def column(values: Sequence[float]) -> Array:
        return xp.asarray(np.asarray(values, dtype=np.float32)[:, None], device=device)

    def per_row(values: Sequence[float]) -> Array:
        return xp.asarray(np.asarray(values, dtype=np.float32)[owner, None], device=device)

    def index(values: Sequence[int]) -> Array:
        return xp.asarray(values, dtype=xp.int64, device=device)

    def rows_where(test: Callable[[SamplingParams], object]) -> list[int]:
        if not any(map(test, distinct)):  # asked of each distinct setting first: most batches use few controls
            return []
        return rows_of([bool(test(p)) for p in params])

    def rows_of(chosen: Sequence[bool]) -> list[int]:
        rows: list[int] = np.flatnonzero(np.asarray(chosen)[owner]).tolist() if any(chosen) else []
        return rows

    def params_of(row: int) -> SamplingParams:
        return params[int(owner[row])]

    greedy = rows_where(lambda p: p.temperature == 0.0)
    weighed = [job.rule == "rejection" and p.temperature > 0.0 for job, p in zip(jobs, params, strict=True)]
    stream = np.asarray([Stream.DRAFT if w else Stream.TARGET for w in weighed], dtype=np.int32)
    words = np.asarray([[job.words[0] for job in jobs], [job.words[1] for job in jobs]], dtype=np.int32)
    controls = Controls(
        words=xp.asarray(words[:, owner], device=device),
        # greedy rows take the argmax before temperature and filters, so those see neutral values
        sampled=per_row([0.0 if p.temperature == 0.0 else 1.0 for p in params]) if greedy else None,
        all_greedy=len(greedy) == len(owner),
        weighed=weighed,
        draft_stream=xp.asarray(stream, device=device),
        processed=rows_where(lambda p: p.processors),
        penalised=rows_where(lambda p: p.penalised),
        constrained=rows_of([job.grammar is not None for job in jobs]),
        held=rows_of([job.min_length > 0 for job in jobs]),
    )
    if ruled := rows_where(lambda p: p.logit_bias or p.banned):
        bias = [(row, token, value) for row in ruled for token, value in _biases(params_of(row))]
        rows, ids, values = zip(*bias, strict=True)
        controls.bias = (index(rows), index(ids), xp.asarray(values, dtype=xp.float32, device=device))
    if rows_where(lambda p: p.temperature not in (0.0, 1.0)):
        # a denormal would become 0 in float32, and 0 / 0 is no number
        controls.temperature = per_row([max(p.temperature, 1e-30) if p.temperature else 1.0 for p in params])
    if ranked := rows_where(lambda p: p.temperature and (p.top_k is not None or p.top_p < 1.0)):
        # top_p 2 is "off": rounding may carry a cumulative mass just past 1; and 0 would keep nobody
        top_p = [max(params_of(row).top_p, 1e-30) if params_of(row).top_p < 1.0 else 2.0 for row in ranked]
        controls.ranked = (index(ranked), column([params_of(row).top_k or math.inf for row in ranked]), column(top_p))
    if rows_where(lambda p: p.temperature and p.min_p > 0.0):
        floor = [math.log(p.min_p) if p.temperature and p.min_p > 0.0 else -math.inf for p in params]
        controls.min_p = per_row(floor)
    if typical := rows_where(lambda p: p.temperature and p.typical_p < 1.0):
        controls.typical = (index(typical), column([max(params_of(row).typical_p, 1e-30) for row in typical]))
    return controls


def _biases(params: SamplingParams) -> list[tuple[int, float]]:
    """Logit bias and banned ids as one list: a ban is a bias of minus infinity."""
    banned = frozenset(params.banned)
    shifts = [(token, value) for token, value in params.logit_bias.items() if token not in banned]
    return shifts + [(token, -math.inf) for token in banned]


@dataclass(slots=True)
class Shaped:
    """Shaped logits [R, V], and the rows that were unusable (their content is then arbitrary but harmless)."""

    logits: Array
    faults: dict[int, OutriderError]


def adjust(xp: Any, logits: Array, controls: Controls, history: History, faults: dict[int, OutriderError]) -> Array:
    """The first group of `SamplingParams`, up to banned ids, in float32. Logits stay as they are where no row asks."""
    x = xp.astype(logits, xp.float32, copy=controls.changes_logits)
    for row in controls.processed:
        _process(xp, x, row, history, faults)
    if controls.penalised:
        _penalise(xp, x, controls.penalised, history)
    if controls.bias is not None:
        rows, ids, values = controls.bias
        x[rows, ids] = x[rows, ids] + values
    if controls.held:
        _hold(xp, x, controls.held, history)
    if controls.constrained:
        _constrain(xp, x, controls.constrained, history, faults)
    return x


def shape(xp: Any, logits: Array, controls: Controls, history: History) -> Shaped:
    """The target distribution of each row, in the order of `SamplingParams`. logits [R, V]"""
    faults: dict[int, OutriderError] = {}
    x = adjust(xp, logits, controls, history, faults)
    peak = xp.max(x, axis=-1, keepdims=True)
    usable = xp.isfinite(peak)
    if not usable.all():  # a NaN anywhere in a row makes its maximum NaN
        for row in (row for row, good in enumerate(usable[:, 0].tolist()) if not good):
            faults.setdefault(row, diagnose(xp, logits[row, :], x[row, :]))
        x = xp.where(usable, x, xp.zeros_like(x))
        peak = xp.where(usable, peak, xp.zeros_like(peak))
    if controls.all_greedy:
        return Shaped(x, faults)
    x = x - peak
    if controls.temperature is not None:
        x /= controls.temperature
    if controls.ranked is not None:
        rows, top_k, top_p = controls.ranked
        x[rows, ...] = _keep_ranked(xp, x[rows, ...], top_k, top_p)
    if controls.min_p is not None:
        x = xp.where(x < controls.min_p, -xp.inf, x)
    if controls.typical is not None:
        rows, typical_p = controls.typical
        x[rows, ...] = _keep_typical(xp, x[rows, ...], typical_p)
    return Shaped(x, faults)


def softmax(xp: Any, x: Array) -> Array:
    """Probabilities of shaped logits. [R, V]"""
    mass = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    mass /= xp.sum(mass, axis=-1, keepdims=True)
    return mass


def _process(xp: Any, x: Array, row: int, history: History, faults: dict[int, OutriderError]) -> None:
    """The user's own processors, one after another. A failing one ends this request only."""
    job, ancestors = history(row)
    tokens = [*job.tokens, *ancestors]
    for processor in job.params.processors:
        try:
            row_out = processor(tokens, xp.asarray(x[row, :], copy=True))
            if tuple(row_out.shape) != (x.shape[1],):
                raise ValueError(f"it returned shape {tuple(row_out.shape)}")
            x[row, :] = row_out
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            cure = f"it must return a row of {x.shape[1]} numbers"
            faults[row] = RequestError(f"a logits processor failed: {error}; {cure}", param="processors")
            faults[row].__cause__ = error
            return


def _penalise(xp: Any, x: Array, rows: Sequence[int], history: History) -> None:
    """Repetition penalty on all earlier tokens, then presence and frequency penalties on the output's, in place.

    Only tokens that occurred change, so each row touches as many logits as its history has distinct tokens.
    """
    at: list[int] = []
    ids: list[int] = []
    columns: list[tuple[float, float, float, float]] = []  # times emitted, repetition, presence, frequency
    for row in rows:
        job, ancestors = history(row)
        assert job.counts is not None, "a penalised job without counts"
        params, counts = job.params, dict(job.counts)
        for token in ancestors:
            counts[token] = counts.get(token, 0) + 1
        for token, times in counts.items():
            at.append(row)
            ids.append(token)
            columns.append((times, params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
    device = x.device
    where = (xp.asarray(at, dtype=xp.int64, device=device), xp.asarray(ids, dtype=xp.int64, device=device))
    table = xp.asarray(columns, dtype=xp.float32, device=device)
    times, repetition, presence, frequency = table[:, 0], table[:, 1], table[:, 2], table[:, 3]
    values = x[where]
    values = xp.where(values > 0, values / repetition, values * repetition)
    values -= presence * xp.astype(times > 0, xp.float32)
    values -= frequency * times
    x[where] = values


def _hold(xp: Any, x: Array, rows: Sequence[int], history: History) -> None:
    """No stop id before the answer has the length it must have, in place."""
    for row in rows:
        job, ancestors = history(row)
        if len(job.tokens) + len(ancestors) < job.min_length and job.stop_ids:
            x[row, xp.asarray(sorted(job.stop_ids), dtype=xp.int64, device=x.device)] = -xp.inf


def _constrain(xp: Any, x: Array, rows: Sequence[int], history: History, faults: dict[int, OutriderError]) -> None:
    """Rule out what the grammar does not let follow, in place. Rows after a forbidden draft, or after the end of what
    is allowed, are of a text that never will be: they are left as they are."""
    at: list[int] = []
    masks: list[Array] = []
    for row in rows:
        job, ancestors = history(row)
        assert job.grammar is not None, "a constrained job without a grammar"
        try:
            mask = job.grammar.allowed(ancestors)
        except OutriderError as error:
            faults[row] = error
            continue
        if mask is not None and mask.any():
            at.append(row)
            masks.append(mask)
    if at:
        where = xp.asarray(at, dtype=xp.int64, device=x.device)
        may = xp.asarray(np.stack(masks), device=x.device)
        x[where, ...] = xp.where(may, x[where, ...], -xp.inf)


def _keep_ranked(xp: Any, x: Array, top_k: Array, top_p: Array) -> Array:
    """The top_k highest, and of those the fewest whose mass reaches top_p. [r, V]; ties go to the lowest id."""
    if x.shape[1] >= PRUNED and is_numpy_namespace(xp):
        limits = zip(top_k[:, 0].tolist(), top_p[:, 0].tolist(), strict=True)
        return np.stack([_keep_ranked_row(row, k, p) for row, (k, p) in zip(x, limits, strict=True)])
    order = xp.argsort(-x, axis=-1, stable=True)
    ranked = xp.take_along_axis(x, order, axis=-1)
    rank = xp.arange(x.shape[1], dtype=xp.float32, device=x.device)
    ranked = xp.where(rank < top_k, ranked, -xp.inf)
    return _keep_mass(xp, x, order, ranked, top_p)


def _keep_ranked_row(row: Array, top_k: float, top_p: float) -> Array:
    """The same for one long row of numpy's, whose highest is 0, without sorting what cannot be chosen. [V]

    Sorting 50,000 numbers takes 5 ms, and all but a few hundred of them are out of reach: tokens above a floor are
    ranked, and the floor falls until they are enough.
    """
    total = math.inf
    if top_k == math.inf:
        total = top_p * float(np.cumsum(np.exp(row), dtype=np.float64)[-1])
    for floor in (-8.0, -24.0, -math.inf):
        likely = np.flatnonzero(row > floor)
        order = likely[np.argsort(-row[likely], kind="stable")]
        if top_k != math.inf:
            order = order[: int(top_k)]
        mass = np.exp(row[order])
        running = np.cumsum(mass, dtype=np.float64)
        enough = running[-1] >= total if top_k == math.inf else len(order) == top_k
        if enough:
            break
    if top_k != math.inf:
        total = top_p * float(running[-1])
    kept = order[running - mass < total]
    out = np.full_like(row, -np.inf)
    out[kept] = row[kept]
    return out


def _keep_typical(xp: Any, x: Array, typical_p: Array) -> Array:
    """The tokens whose surprise is closest to the row's entropy, until their mass reaches typical_p. [r, V]"""
    x = x - xp.max(x, axis=-1, keepdims=True)
    mass = xp.exp(x)
    total = _running_sum(xp, mass)[:, -1:]
    possible = mass > 0
    surprise = xp.where(possible, xp.log(total) - x, 0.0)
    entropy = _running_sum(xp, mass * surprise)[:, -1:] / total
    order = xp.argsort(xp.where(possible, xp.abs(surprise - entropy), xp.inf), axis=-1, stable=True)
    return _keep_mass(xp, x, order, xp.take_along_axis(x, order, axis=-1), typical_p)


def _keep_mass(xp: Any, x: Array, order: Array, ranked: Array, limit: Array) -> Array:
    """Of `ranked` (x in `order`), keep tokens until their share of mass reaches `limit`; the one that crosses stays."""
    mass = xp.exp(ranked - xp.max(ranked, axis=-1, keepdims=True))
    running = _running_sum(xp, mass)
    kept = xp.where(running - mass < limit * running[:, -1:], ranked, -xp.inf)
    out = xp.empty_like(x)
    out[xp.arange(x.shape[0], device=x.device)[:, None], order] = kept
    return out


def _running_sum(xp: Any, mass: Array) -> Array:
    """Sums in order of position. A plain sum may be split over threads differently for one row than for many, and the
    last digit decides who is in at the edge: a row's choice must not depend on its neighbours. [r, V] float64"""
    return xp.cumulative_sum(mass, axis=-1, dtype=xp.float64)


def changes_logits(job: Job) -> bool:
    """Whether a request does more to its rows than temperature and filters."""
    p = job.params
    return bool(p.processors or p.penalised or p.logit_bias or p.banned or job.grammar is not None or job.min_length)


def diagnose(xp: Any, model_row: Array, row: Array) -> OutriderError:
    """Why a row has no usable maximum: the model's fault, or what the request did to it."""
    if bool(xp.any(xp.isnan(model_row))):
        return BackendError("the model returned NaN logits; check its weights and number format", param="logits")
    if not bool(xp.isfinite(xp.max(model_row))):
        return BackendError("the model returned a row without finite logits; check its weights", param="logits")
    if bool(xp.any(xp.isnan(row))) or bool(xp.max(row) > 0):
        return RequestError("a logits processor returned NaN or infinity; return finite logits", param="processors")
    return RequestError(
        "bans, logit bias, min_tokens, a constraint or processors leave no token to choose from; allow at least one",
        param="banned",
    )
