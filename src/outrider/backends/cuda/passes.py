"""Passes of a transformer on a GPU: sequences in pages, passes as programs, graphs for those that come often."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.backends.base import Spans
from outrider.backends.checks import check_spans
from outrider.backends.cuda import twins
from outrider.backends.cuda.forward import Constants, Long
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.layout import (
    GRAPH_ROWS,
    MASK_BITS,
    WORK_ROWS,
    Rows,
    Shape,
    arrange,
    graph_rows,
    group_room,
    most_splits,
    tile_for,
)
from outrider.backends.cuda.program import Later, Model, Program, Work, build_work
from outrider.backends.paged import PagedSequences, info_of
from outrider.backends.torch_common import array_of, on, sampling_for, sent
from outrider.backends.weights import Loader
from outrider.kv.pages import Page, Pages
from outrider.kv.store import PageStore
from outrider.models.base import ModelFile, TransformerSpec
from outrider.models.cache import progress
from outrider.sampling.ops import SamplingOps, remember
from outrider.types import Scores, Slot

LONG, LONGEST = 64, 512  # tokens of a chain from which torch's attention for prompts is faster: of one, of many
FAR = 8192  # tokens of a sequence: up to here a graph is up to 9 times quicker, or less than a tenth slower
STRICT_ROWS = 16  # of every pass in strict mode: the smallest size our products have

Scored = tuple[torch.Tensor, dict[int, torch.Tensor]]


class Piece(NamedTuple):
    """Some tokens of one span, which follow one another."""

    span: int
    first: int  # of the span's tokens
    size: int


class Staged(NamedTuple):
    """A pass that is written down: of which tokens of which sequences, and where those lay at that time."""

    program: Program
    slots: list[Slot]
    starts: list[int]
    pieces: list[Piece]
    hidden: tuple[int, ...]
    pages: list[list[Page]]

    def is_for(self, spans: Spans, pieces: Sequence[Piece], hidden: Sequence[int], pages: Pages) -> bool:
        return (
            self.starts == spans.starts
            and self.slots == spans.slots
            and self.pieces == pieces
            and not spans.parents
            and self.hidden == tuple(hidden)
            and all(pages.leases[slot].pages == ids for slot, ids in zip(self.slots, self.pages, strict=True))
        )


class Passes(PagedSequences):
    """A model and its sequences, and passes over them as somebody asks for them.

    On a CPU it runs the kernels' twins, or the kernels themselves in Triton's interpreter: for tests.
    """

    fingerprint: str | None = None  # of the weights, where they came from a file

    def __init__(
        self,
        file: ModelFile,
        pages: Pages,
        *,
        vocab_size: int | None = None,
        context: int | None = None,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        strict: bool = False,
        kernels: Any = None,
        graphs: bool = True,
    ) -> None:
        spec = file.spec
        assert isinstance(spec, TransformerSpec), f"{file.path} holds a {spec.family}"
        self.spec, self.pages, self.strict = spec, pages, strict
        self.device = torch.device(device)
        self.info = info_of(file, spec, pages, vocab_size, context)
        # on a CPU, by its twins, what a model feeds itself is torch's
        self.ops = sampling_for(self.device) if self.device.type == "cuda" else SamplingOps(np)
        self.weights = Loader(file, spec, dtype, self.device).load()
        scratch = pages.num_pages * pages.page_size
        shape = (spec.num_layers, scratch + 1, 2 * spec.num_kv_heads * spec.head_dim)
        self.store = PageStore(
            torch.zeros(shape, dtype=dtype, device=self.device), spec.num_kv_heads, pages.page_size
        )  # zeros: what fills a pass up must be numbers
        self.number = pages.add_store(self.store)
        self._max_splits = most_splits(spec.num_kv_heads)
        self._share = spec.num_heads // spec.num_kv_heads
        self._has_graphs = graphs and self.device.type == "cuda"
        windows = spec.windows or (None,) * spec.num_layers
        self._by_path = strict or any(window is not None for window in windows)
        self._model = Model(
            spec=spec,
            weights=self.weights,
            held=self.store.layers,
            kernels=kernels or _kernels(self.device),
            constants=Constants(
                heads=(spec.num_heads, spec.num_kv_heads, spec.head_dim),
                floor=spec.width * spec.norm_eps,
                head_floor=spec.head_dim * spec.norm_eps,
                page_size=pages.page_size,
                windows=windows,
                tile=STRICT_ROWS if strict else None,
            ),
            frequencies=torch.tensor(spec.rope.frequencies, device=self.device),
            scratch=scratch,
            graphs=Graphs(self.device) if self._has_graphs else None,
        )
        self._programs: dict[Hashable, Program] = {}
        self._work: dict[int, Work] = {}  # by rows: programs run one after another, and what they leave is copied
        self._staged: Staged | None = None  # what will probably come next
        self._indices: dict[Hashable, torch.Tensor] = {}  # places of a pass's tokens, as they come again and again
        self._numbers = torch.arange(GRAPH_ROWS[-1], device=self.device)
        self._ones = torch.ones(GRAPH_ROWS[-1], dtype=torch.int32, device=self.device)

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        check_spans(spans, hidden, self.info, self.length)
        self._make_room(spans)
        with torch.inference_mode(), on(self.device):
            logits, states = self._score_and_look(spans, tuple(hidden))
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            self._advance(slot, start + count)
        rows = [rows for rows in spans.rows if rows]
        return Scores(rows, array_of(logits), hidden={layer: array_of(state) for layer, state in states.items()})

    def _score_and_look(self, spans: Spans, hidden: tuple[int, ...]) -> Scored:
        return self._score(spans, hidden)

    def _forget(self) -> None:
        """What was written down is of a time that is over."""
        self._staged = None

    def _score(self, spans: Spans, hidden: Sequence[int]) -> Scored:
        return (self._score_strictly if self.strict else self._score_once)(spans, hidden)

    def _score_once(self, spans: Spans, hidden: Sequence[int]) -> Scored:
        """Everything in one pass."""
        if sum(spans.counts) <= GRAPH_ROWS[-1] and not self._is_far(spans):
            return self._score_pieces(spans, whole(spans.counts), spans.tokens, hidden)
        # each has calls of its own there, in every layer: for many chains that is slower than their attention
        limit = min(LONGEST, LONG * max(1, sum([count > LONG for count in spans.counts])))
        is_long = [count > limit and index not in spans.parents for index, count in enumerate(spans.counts)]
        return self._score_prompts(spans, is_long, hidden)

    def _is_far(self, spans: Spans) -> bool:
        """Whether some chain is so long, and so far on, that torch's attention is worth a pass that is no graph."""
        return any(
            count > LONG and start + count > FAR and index not in spans.parents
            for index, (start, count) in enumerate(zip(spans.starts, spans.counts, strict=True))
        )

    def _score_strictly(self, spans: Spans, hidden: Sequence[int]) -> Scored:
        """Passes of one size through kernels of one size: a row's bits depend on nothing but its own tokens.

        Keys come in order of position, chain or tree. Slower, since prompts are read in small steps.
        """
        tokens, at = np.asarray(torch.as_tensor(spans.tokens).cpu()), 0
        parts = []
        for pieces in _cut(spans.counts, STRICT_ROWS):
            end = at + sum(piece.size for piece in pieces)
            parts.append(self._score_pieces(spans, pieces, tokens[at:end], hidden))
            at = end
        states = {layer: torch.cat([states[layer] for _, states in parts]) for layer in hidden}
        return torch.cat([logits for logits, _ in parts]), states

    def _score_pieces(self, spans: Spans, pieces: Sequence[Piece], tokens: Any, hidden: Sequence[int]) -> Scored:
        """A pass of a few rows, through a graph where there are graphs."""
        staged, self._staged = self._staged, None
        if staged is None or not staged.is_for(spans, pieces, hidden, self.pages):
            staged = self._stage(spans, pieces, tuple(hidden))
        program = staged.program
        program.run(tokens, self._later(spans))
        self._record(program)
        total, wanted = sum(piece.size for piece in pieces), _wanted(spans, pieces)
        states = program.copied(slice(total)) if hidden else {}
        rows = slice(total) if len(wanted) == total else sent(wanted, np.int64, self.device)
        return program.logits[rows].clone(), states

    def _record(self, program: Program) -> None:
        """From its second run on, a pass of a few rows is a graph."""
        if self._has_graphs and not program.is_recorded:
            with progress(1, f"recording a pass of {program.layout.shape.rows} rows of {self.info.name}"):
                program.record()

    def _later(self, spans: Spans) -> Later | None:
        if spans.later is None:
            return None
        places, tokens = spans.later
        return Later(
            self._index(tuple(places)), torch.as_tensor(tokens).clamp(min=0).int()
        )  # -1: no token; the judge will see to it

    def _stage(self, spans: Spans, pieces: Sequence[Piece], hidden: tuple[int, ...], ahead: int = 0) -> Staged:
        rows, tile = self._arrange(spans, pieces, ahead=ahead)
        total = sum(piece.size for piece in pieces)
        shape = Shape(
            rows=STRICT_ROWS if self.strict else graph_rows(total),
            groups=group_room(rows.num_groups),
            tile=tile,
            tree="paths" if self.strict else rows.tree,
        )
        program = self._program(shape, hidden, len(rows.table))
        program.stage(rows)
        pages = [list(self.pages.leases[slot].pages) for slot in spans.slots]
        return Staged(program, list(spans.slots), list(spans.starts), list(pieces), hidden, pages)

    def _index(self, places: tuple[int, ...]) -> torch.Tensor:
        return remember(self._indices, places, lambda: sent(places, np.int64, self.device))

    def _program(self, shape: Shape, hidden: tuple[int, ...], needed: int) -> Program:
        """For passes of a shape, whose page ids and paths take `needed` integers."""
        key = (shape, hidden, len(self.weights.layers))
        program = self._programs.get(key)
        if program is None or program.room < needed:
            longest = min(-(-self.info.context // self.pages.page_size), self.pages.num_pages)
            room = max(needed, shape.rows * (longest + (MASK_BITS if shape.tree == "paths" else 0)))
            most = next(size for size in WORK_ROWS if size >= shape.rows)
            work = self._work.get(most)
            if work is None:
                work = self._work[most] = build_work(self.spec, most, self.weights.embedding)
            model = self._model._replace(weights=self.weights)
            program = self._programs[key] = Program(model, shape, room, hidden, work=work)
        return program

    def _score_prompts(self, spans: Spans, is_long: Sequence[bool], hidden: Sequence[int]) -> Scored:
        """A large pass, as it stands; the attention of long spans is torch's."""
        self._forget()
        pieces = whole(spans.counts)
        rows, tile = self._arrange(spans, pieces, is_long)
        long, first = [], 0
        for index, count in enumerate(spans.counts):
            if is_long[index]:
                start = spans.starts[index]
                places = None if start == 0 else sent(self._places(spans, index), np.int64, self.device)
                long.append(Long(first, count, places))
            first += count
        wanted = sent(_wanted(spans, pieces), np.int64, self.device)
        program = Program(
            self._model._replace(weights=self.weights),
            Shape(rows=first, groups=rows.num_groups, tile=tile, tree=rows.tree),
            len(rows.table),
            hidden,
            work=build_work(self.spec, first, self.weights.embedding, (rows.num_seated, rows.num_splits), len(wanted)),
            num_splits=rows.num_splits,
            wanted=wanted,
            long=long,
        )
        program.stage(rows)
        program.run(spans.tokens, self._later(spans))
        program.work.holder = None  # nobody comes back to it: in a circle its memory would stay until that is found
        return program.logits, program.states

    def _arrange(
        self, spans: Spans, pieces: Sequence[Piece], apart: Sequence[bool] | None = None, ahead: int = 0
    ) -> tuple[Rows, int]:
        """The pieces as rows and groups, and how many rows a group may have."""
        parents, leases = _parents_of(spans, pieces), self.pages.leases
        longest = max(0 if apart and apart[piece.span] else piece.size for piece in pieces)
        tile = tile_for(longest, self._share, strict=self.strict)
        rows = arrange(
            [spans.starts[piece.span] + piece.first for piece in pieces],
            [piece.size for piece in pieces],
            [leases[spans.slots[piece.span]].pages for piece in pieces],
            self.pages.page_size,
            parents,
            tile=tile,
            max_splits=self._max_splits,
            by_path=self._by_path or any(len(tree) > MASK_BITS for tree in parents.values()),
            apart=apart,
            ahead=ahead,
        )
        return rows, tile

    def _places(self, spans: Spans, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where all tokens of a span's sequence lie."""
        at, size = np.arange(spans.starts[index] + spans.counts[index]), self.pages.page_size
        return np.asarray(self.pages.leases[spans.slots[index]].pages)[at // size] * size + at % size

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weights.embedding.index_select(0, tokens)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.empty(len(hidden), self.spec.num_columns, device=self.device)
        step = STRICT_ROWS if self.strict else max(1, len(hidden))
        with on(self.device):
            for start in range(0, len(hidden), step):
                rows, out = hidden[start : start + step].contiguous(), logits[start : start + step]
                self._model.kernels.product(rows, self.weights.output.t(), out, tile=self._model.constants.tile)
        return logits


def _kernels(device: torch.device) -> Any:
    if device.type == "cpu":
        return twins
    from outrider.backends.cuda import kernels

    return kernels


def _cut(counts: Sequence[int], size: int) -> list[list[Piece]]:
    """Spans in passes of at most `size` tokens, in order."""
    passes: list[list[Piece]] = []
    room = 0
    for span, count in enumerate(counts):
        first = 0
        while first < count:
            if room == 0:
                passes.append([])
                room = size
            taken = min(room, count - first)
            passes[-1].append(Piece(span, first, taken))
            first += taken
            room -= taken
    return passes


def _parents_of(spans: Spans, pieces: Sequence[Piece]) -> Mapping[int, Sequence[int]]:
    """Of pieces that belong to trees: the parents of everything up to the piece's end."""
    parents = {}
    for index, piece in enumerate(pieces):
        whole = spans.parents.get(piece.span)
        if whole is not None:
            parents[index] = whole[: len(whole) - spans.counts[piece.span] + piece.first + piece.size]
    return parents


def _wanted(spans: Spans, pieces: Sequence[Piece]) -> list[int]:
    """Which tokens of these pieces, counted from the first, are scored."""
    wanted: list[int] = []
    at = 0
    for span, first, count in pieces:
        begin = max(0, spans.counts[span] - spans.rows[span] - first)
        wanted += range(at + begin, at + count)
        at += count
    return wanted


def whole(counts: Sequence[int]) -> list[Piece]:
    return [Piece(index, 0, count) for index, count in enumerate(counts)]
