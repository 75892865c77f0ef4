"""Sampling in native code: the twin of `SamplingOps` for numpy arrays, at a tenth of the time.

The same verdicts, except where two tokens are so close that the last digit decides. What changes a few logits only
(processors, penalties, bias, bans, constraints) and typical-p stay in Python; what reads whole rows is native.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import OutriderError
from outrider.native.binding import address
from outrider.native.library import library, why_not
from outrider.sampling.noise import Noise, Stream
from outrider.sampling.ops import Drawn, SamplingOps, remember
from outrider.sampling.warp import Controls, History, Shaped, adjust, changes_logits, diagnose, shape
from outrider.types import Array, Drafts, Job, SamplingParams, Scores, Verdicts

# As sampling.cpp has them.
_JOB = np.dtype(
    [
        ("first_word", np.int32),
        ("second_word", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("is_matching", np.int32),
    ]
)
_NODE = np.dtype([(name, np.int32) for name in ("row", "child", "sibling", "rank", "draft", "depth")])
BRIEF = 2**14  # numbers in the rows of a call that takes a few microseconds
_OFF = (0, 2.0, -math.inf)  # top_k, top_p, min_p

_POINTER = ctypes.c_void_p
_ROWS: list[Any] = [_POINTER, ctypes.c_int64, ctypes.c_int32, _POINTER, ctypes.c_int32]  # logits to number of jobs


@dataclass(slots=True)
class _Settings:
    """The settings of some jobs, for native code."""

    jobs: Array  # [B] of _JOB
    address: int
    weighed: bool  # whether somebody's draft probabilities will be asked for
    streams: Array  # [B] int32: the noise a job's draft token is drawn with
    changes_logits: bool
    is_typical: bool


@dataclass(slots=True)
class _Nodes:
    """The drafts of a round, for native code: every job's root, then its drafts."""

    nodes: Array  # [M] of _NODE
    roots: Array  # [B] int32
    addresses: tuple[int, int]  # of the roots, of the nodes
    rows: list[int]
    parents: list[int]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one, both included."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


class NativeNoise(Noise):
    """Keyed noise whose draws are native."""

    def __init__(self, native: ctypes.CDLL) -> None:
        super().__init__(np)
        self._native = native

    def draw(
        self, x: Array, words: Array, positions: Array, stream: Array | int, sampled: Array | None = None
    ) -> Array:
        jobs = np.empty(x.shape[0], dtype=_JOB)
        jobs["first_word"], jobs["second_word"] = words[0], words[1]
        jobs["temperature"] = 1.0 if sampled is None else sampled[:, 0]
        jobs["top_k"], jobs["top_p"], jobs["min_p"] = _OFF
        jobs["is_matching"] = 1
        streams = np.empty(x.shape[0], dtype=np.int32)
        streams[...] = stream
        return _draw(self._native, x, address(jobs), positions, streams, None)[0]


class NativeDrawing:
    """`sampling.ops.Drawing` for a model that is native, too: it may write what it draws itself (`native/roll.h`)."""

    watch = None

    def __init__(self, native: ctypes.CDLL, settings: _Settings, lengths: Sequence[int], steps: int) -> None:
        self._native, self._step = native, 0
        self.settings, self.streams = settings.address, settings.streams
        self._kept = settings  # whose address that is
        self.lengths = np.array(lengths, dtype=np.int32)
        self.drawn = np.zeros((len(lengths), steps), dtype=np.int64)
        self._probs: Array | None = None

    def probs(self, vocab_size: int) -> Array | None:
        """Where the rows go that are drawn from; None: nobody will ask for them. [B, steps, V]"""
        if self._probs is None and self._kept.weighed:
            self._probs = np.empty((*self.drawn.shape, vocab_size), dtype=np.float32)
        return self._probs

    def step(self, logits: Array) -> Array:
        at, self._step = self._step, self._step + 1
        probs = self.probs(logits.shape[1])
        rows = None if probs is None else np.empty(logits.shape, dtype=np.float32)
        positions = self.lengths + np.int32(at)
        self.drawn[:, at] = _draw(self._native, logits, self.settings, positions, self.streams, rows)[0]
        if probs is not None:
            probs[:, at] = rows
        return self.drawn[:, at]

    def result(self, counts: Sequence[int]) -> tuple[Array, Array | None]:
        tokens, probs = self.drawn, self._probs
        if all(count == tokens.shape[1] for count in counts):  # nothing need be copied
            return tokens.reshape(-1), None if probs is None else probs.reshape(-1, probs.shape[2])
        parts = list(enumerate(counts))
        rows = None if probs is None else np.concatenate([probs[index, :count] for index, count in parts])
        return np.concatenate([tokens[index, :count] for index, count in parts]), rows


class NativeSampling(SamplingOps):
    """`SamplingOps` for numpy arrays in native code."""

    def __init__(self, native: ctypes.CDLL | None = None) -> None:
        super().__init__(np)
        self._native = declare(library() if native is None else native)
        # Releasing the interpreter's lock costs tens of microseconds where another thread waits for it.
        self._brief = declare(ctypes.PyDLL(self._native._name))
        self.noise = NativeNoise(self._native)
        self._settings: dict[Hashable, _Settings] = {}
        self._nodes: dict[Hashable, _Nodes] = {}

    def judge(self, jobs: Sequence[Job], drafts: Drafts, scores: Scores) -> Verdicts:
        num_jobs, history = len(jobs), self._history(jobs, drafts, scores)
        faults: dict[int, OutriderError] = {}
        x, settings = self._prepare(jobs, scores.counts, scores.logits, history, faults)
        nodes = self._nodes_of(drafts, scores.counts)
        lengths = np.array([len(job.tokens) for job in jobs], dtype=np.int32)
        tokens = np.ascontiguousarray(drafts.tokens, dtype=np.int64)
        probs = None if drafts.probs is None else _plain(drafts.probs)
        out = np.empty((4, num_jobs), dtype=np.int64)
        native = self._brief if x.size <= BRIEF else self._native
        native.outrider_judge(
            address(x),
            x.strides[0] // 4,
            x.shape[1],
            settings.address,
            num_jobs,
            address(lengths),
            *nodes.addresses,
            address(tokens),
            None if probs is None else address(probs),
            0 if probs is None else probs.strides[0] // 4,
            address(out),
        )
        verdicts = Verdicts(out[0], out[1])
        ends, unusable = out[2:].tolist()
        for row in unusable:
            if row >= 0:
                faults.setdefault(row, diagnose(np, scores.logits[row, :], x[row, :]))
        for index in drafts.parents:
            path = nodes.path(ends[index])
            verdicts.paths[index] = [node - path[0] - 1 for node in path[1:]]
        if faults:  # those of rows that were not looked at are of a text that never was
            for index, end in enumerate(ends):
                for node in nodes.path(end):
                    if nodes.rows[node] in faults:
                        verdicts.faults[index] = faults[nodes.rows[node]]
        return verdicts

    def drawing(self, jobs: Sequence[Job], steps: int, further: Array | None = None) -> NativeDrawing | None:
        """As long as nothing but native code shapes their rows."""
        settings = self._settings_of(jobs)
        if settings.changes_logits or settings.is_typical or further is not None:
            return None
        return NativeDrawing(self._native, settings, [len(job.tokens) for job in jobs], steps)

    def draft(self, jobs: Sequence[Job], drafted: Sequence[Sequence[int]], logits: Array) -> Drawn:
        faults: dict[int, OutriderError] = {}
        x, settings = self._prepare(jobs, [1] * len(jobs), logits, lambda row: (jobs[row], drafted[row]), faults)
        positions = self._int32([len(job.tokens) + len(d) for job, d in zip(jobs, drafted, strict=True)])
        probs = np.empty(x.shape, dtype=np.float32) if settings.weighed else None
        tokens, unusable = _draw(self._native, x, settings.address, positions, settings.streams, probs)
        for row in np.flatnonzero(unusable).tolist():
            faults.setdefault(row, diagnose(np, logits[row, :], x[row, :]))
        return Drawn(tokens, probs, faults)

    def _shape(self, jobs: Sequence[Job], logits: Array, controls: Controls, history: History) -> Shaped:
        if controls.typical is not None:
            return super()._shape(jobs, logits, controls, history)
        faults: dict[int, OutriderError] = {}
        x, settings = self._prepare(jobs, [1] * len(jobs), logits, history, faults)
        shaped, unusable = np.empty(x.shape, dtype=np.float32), np.empty(len(jobs), dtype=np.int64)
        self._native.outrider_shape(
            address(x),
            x.strides[0] // 4,
            x.shape[1],
            settings.address,
            len(jobs),
            address(shaped),
            address(unusable),
        )
        for row in np.flatnonzero(unusable).tolist():
            faults.setdefault(row, diagnose(np, logits[row, :], x[row, :]))
        return Shaped(shaped, faults)

    def _prepare(
        self,
        jobs: Sequence[Job],
        counts: Sequence[int],
        logits: Array,
        history: History,
        faults: dict[int, OutriderError],
    ) -> tuple[Array, _Settings]:
        """What Python does to the rows before native code reads them, and the settings that are left for that."""
        settings = self._settings_of(jobs)
        if settings.is_typical:
            shaped = shape(np, logits, self._controls_of(jobs, counts), history)
            faults.update(shaped.faults)
            return _plain(shaped.logits), self._settings_of(jobs, is_shaped=True)
        if settings.changes_logits:
            logits = adjust(np, logits, self._controls_of(jobs, counts), history, faults)
        return _plain(logits), settings

    def _settings_of(self, jobs: Sequence[Job], *, is_shaped: bool = False) -> _Settings:
        key = (is_shaped, *[job.id for job in jobs])
        return remember(self._settings, key, lambda: _build_settings(jobs, is_shaped))

    def _nodes_of(self, drafts: Drafts, rows: Sequence[int]) -> _Nodes:
        trees = tuple((index, tuple(parents)) for index, parents in drafts.parents.items())
        key = (tuple(drafts.counts), tuple(rows), trees)
        return remember(self._nodes, key, lambda: _build_nodes(drafts, rows))


def cpu_sampling() -> SamplingOps:
    """Sampling for rows in numpy arrays: native code where the library was built, array functions elsewhere."""
    return NativeSampling() if why_not() is None else SamplingOps(np)


def declare(native: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with what its functions of sampling take."""
    native.outrider_judge.argtypes = [*_ROWS, *[_POINTER] * 5, ctypes.c_int64, _POINTER]
    native.outrider_draw.argtypes = [*_ROWS, *[_POINTER] * 4]
    native.outrider_shape.argtypes = [*_ROWS, *[_POINTER] * 2]
    for function in (native.outrider_judge, native.outrider_draw, native.outrider_shape):
        function.restype = None
    return native


def _draw(
    native: ctypes.CDLL, x: Array, settings: int, positions: Array, streams: Array, probs: Array | None
) -> tuple[Array, Array]:
    """A token from every row, and whether the row was unusable. [R] each"""
    x, positions = _plain(x), np.ascontiguousarray(positions, dtype=np.int32)
    out = np.empty((2, x.shape[0]), dtype=np.int64)
    native.outrider_draw(
        address(x),
        x.strides[0] // 4,
        x.shape[1],
        settings,
        x.shape[0],
        address(positions),
        address(streams),
        None if probs is None else address(probs),
        address(out),
    )
    return out[0], out[1]


def _build_settings(jobs: Sequence[Job], is_shaped: bool) -> _Settings:
    params = [job.params for job in jobs]
    weighed = [job.rule == "rejection" and p.temperature > 0.0 for job, p in zip(jobs, params, strict=True)]
    entries = [
        (*job.words, *_limits(job.params, is_shaped), not is_weighed)
        for job, is_weighed in zip(jobs, weighed, strict=True)
    ]
    array = np.array(entries, dtype=_JOB)
    return _Settings(
        jobs=array,
        address=address(array),
        weighed=any(weighed),
        streams=np.array([Stream.DRAFT if w else Stream.TARGET for w in weighed], dtype=np.int32),
        changes_logits=any(map(changes_logits, jobs)),
        is_typical=any(p.temperature and p.typical_p < 1.0 for p in params),
    )


def _limits(params: SamplingParams, is_shaped: bool) -> tuple[float, int, float, float]:
    """temperature, top_k, top_p and log of min_p; a row that is shaped already needs nothing more."""
    if params.temperature == 0.0:
        return 0.0, *_OFF
    if is_shaped:
        return 1.0, *_OFF
    # a denormal would become 0 in float32; a limit of 0 would keep nobody
    return (
        max(params.temperature, 1e-30),
        min(params.top_k or 0, 2**31 - 1),
        max(params.top_p, 1e-30) if params.top_p < 1.0 else 2.0,
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
    )


def _build_nodes(drafts: Drafts, rows: Sequence[int]) -> _Nodes:
    return _trees(drafts, rows) if drafts.parents else _chains(drafts.counts, rows)


def _chains(drafted: Sequence[int], rows: Sequence[int]) -> _Nodes:
    """What `_trees` would make of chains, for 64 of them in a quarter of the time."""
    counts, num_rows = np.array(drafted, dtype=np.int32), np.array(rows, dtype=np.int32)
    sizes = counts + 1
    roots = np.cumsum(sizes, dtype=np.int32) - sizes
    job = np.repeat(np.arange(len(sizes)), sizes)
    at = np.arange(len(job), dtype=np.int32)
    depth = at - roots[job]
    nodes = np.empty(len(job), dtype=_NODE)
    nodes["row"] = np.where(depth < num_rows[job], (np.cumsum(num_rows) - num_rows)[job] + depth, -1)
    nodes["child"] = np.where(depth < counts[job], at + 1, -1)
    nodes["sibling"], nodes["rank"] = -1, 0
    nodes["draft"] = at - job - 1  # every job up to here has a root that is no draft
    nodes["depth"] = depth
    parents = np.where(depth > 0, at - 1, -1).tolist()
    return _Nodes(nodes, roots, (address(roots), address(nodes)), nodes["row"].tolist(), parents)


def _trees(drafts: Drafts, rows: Sequence[int]) -> _Nodes:
    entries: list[list[int]] = []
    roots: list[int] = []
    parents: list[int] = []
    first_row = first_draft = 0
    for index, (num_drafts, num_rows) in enumerate(zip(drafts.counts, rows, strict=True)):
        root = len(entries)
        roots.append(root)
        places = drafts.parents.get(index, range(-1, num_drafts - 1))
        youngest: dict[int, int] = {}
        for place, above in enumerate([None, *places]):
            row = first_row + place if place < num_rows else -1
            entry = [row, -1, -1, 0, first_draft + place - 1, 0]
            entries.append(entry)
            if above is None:
                parents.append(-1)
                continue
            parent = root + above + 1
            parents.append(parent)
            elder = youngest.get(parent)
            if elder is None:
                entries[parent][1] = root + place
            else:
                entries[elder][2] = root + place
                entry[3] = entries[elder][3] + 1
            youngest[parent] = root + place
            entry[5] = entries[parent][5] + 1
        first_row += num_rows
        first_draft += num_drafts
    nodes = np.array([tuple(entry) for entry in entries], dtype=_NODE)
    starts = np.array(roots, dtype=np.int32)
    return _Nodes(nodes, starts, (address(starts), address(nodes)), [entry[0] for entry in entries], parents)


def _plain(x: Array) -> Array:
    """Rows of float32 without gaps between their numbers, copied only where they are not. [R, V]"""
    if x.dtype == np.float32 and x.strides[1] == 4 and x.strides[0] % 4 == 0:
        return x
    return np.ascontiguousarray(x, dtype=np.float32)
