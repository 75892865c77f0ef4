"""Transformers of the llama kind on a GPU: sequences in pages, passes as programs, graphs for those that come often."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.backends.base import Chains, Rolled, Spans
from outrider.backends.checks import check_spans
from outrider.backends.cuda import twins
from outrider.backends.cuda.eagle import HeadRoller
from outrider.backends.cuda.forward import Constants, Long
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
from outrider.backends.cuda.sampling import DeviceSampling
from outrider.backends.eagle_head import EagleHead
from outrider.backends.paged import PagedSequences, SequencesAhead, info_of
from outrider.backends.torch_common import array_of, on, sampling_for, sent
from outrider.backends.weights import Loader
from outrider.kv.pages import Page, Pages
from outrider.kv.store import PageStore
from outrider.models.base import ModelFile, TransformerSpec
from outrider.models.cache import progress
from outrider.sampling.ops import Drawing, remember
from outrider.types import Scores, Slot

LONG = 64  # tokens of a chain from which torch's attention for prompts is faster than ours
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


class Queued(NamedTuple):
    """A pass of single tokens that runs before anybody asked."""

    staged: Staged
    rows: tuple[int, ...]  # of the verdict that it was fed, one for each of its slots
    chosen: torch.Tensor  # that verdict


class GpuBackend(PagedSequences):
    """A model and its sequences. A draft may share the target's `pages`: its slots are the target's, then.

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
        self.ops = sampling_for(self.device)
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
            pool=torch.cuda.graph_pool_handle() if self._has_graphs else None,
            stream=torch.cuda.Stream(self.device) if self._has_graphs else None,  # type: ignore[no-untyped-call]
        )
        self._programs: dict[Hashable, Program] = {}
        self._work: dict[int, Work] = {}  # by rows: programs run one after another, and what they leave is copied
        self._staged: Staged | None = None  # what will probably come next
        self._expected: tuple[int, ...] = ()  # rows whose tokens it is fed, if it may run before anybody asked
        self._queued: Queued | None = None  # then it does
        self._done: Program | None = None  # that was queued and is asked for now
        if isinstance(self.ops, DeviceSampling):
            self.ops.foresee = self.foresee
            self.ops.may_defer = not strict
        self._indices: dict[Hashable, torch.Tensor] = {}  # places of a pass's tokens, as they come again and again
        self._numbers = torch.arange(GRAPH_ROWS[-1], device=self.device)
        self._ones = torch.ones(GRAPH_ROWS[-1], dtype=torch.int32, device=self.device)

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        self._expected = ()
        check_spans(spans, hidden, self.info, self.length)
        self._make_room(spans)
        with torch.inference_mode(), on(self.device):
            done = self._take_queued(spans, tuple(hidden))
            if isinstance(self.ops, DeviceSampling):
                self.ops.follows = len(done) == len(spans.slots)
            logits, states = self._score_rest(spans, hidden, done) if done else self._score(spans, hidden)
            self._look_ahead(spans, tuple(hidden))
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            self._advance(slot, start + count)
        rows = [rows for rows in spans.rows if rows]
        return Scores(rows, array_of(logits), hidden={layer: array_of(state) for layer, state in states.items()})

    def roll(self, spans: Spans, steps: int, drawing: Drawing) -> bool:
        ends = [start + fed for start, fed in zip(spans.starts, spans.counts, strict=True)]
        if not self._can_roll(spans.slots, [end + steps - 1 for end in ends]):
            return False
        tokens = drawing.step(self.score(spans).logits[:, : self.info.vocab_size])
        self._staged = self._queued = None  # where its program stood, nobody stands now
        if steps > 1:
            self._roll(spans.slots, ends, tokens, None, 0, steps, drawing)
        for slot, end in zip(spans.slots, ends, strict=True):
            self._advance(slot, end + steps - 1)
        return True

    def roll_on(self, chains: Chains, steps: int, drawing: Drawing) -> Rolled | None:
        """Each chain is fed its last two tokens, of which the first may be known: all verdicts look alike, then."""
        count, most = len(chains.slots), max(chains.counts)
        ends = [length + most + steps for length in chains.lengths]  # if all drafts stay
        if not self._can_roll(chains.slots, ends) or 2 * count > GRAPH_ROWS[-1]:
            return None
        with torch.inference_mode(), on(self.device):
            lasts = sent(chains.lasts, np.int32, self.device)
            tokens = torch.cat([lasts, torch.as_tensor(chains.drafted).int()])
            ends_at = remember(self._indices, ("ends", *chains.counts), lambda: self._ends(chains.counts))
            before = tokens[torch.where(chains.accepted > 0, ends_at + chains.accepted, self._numbers[:count])]
            fed = torch.stack([before, chains.following.int()], dim=1).flatten().clamp(min=0)
            pairs = [2] * count
            starts = [length - 1 for length in chains.lengths]
            spans = Spans(chains.slots, starts, pairs, pairs, fed)
            program = self._stage(spans, _whole(pairs), (), ahead=most).program
            self._staged = self._queued = None
            program.run(fed, by=chains.accepted)
            self._record(program)
            tokens = drawing.step(program.logits[1 : 2 * count : 2, : self.info.vocab_size])
            if steps > 1:
                after = [length + 1 for length in chains.lengths]
                self._roll(chains.slots, after, tokens, chains.accepted, most, steps, drawing)
        leases = [self.pages.leases[slot] for slot in chains.slots]
        for lease, end in zip(leases, ends, strict=True):
            lease.written = end
        return Rolled(chains.slots, steps, [list(lease.pages) for lease in leases])

    def _ends(self, counts: Sequence[int]) -> torch.Tensor:
        """Where each chain's last token before its drafts would be, in a row of all last tokens and then all drafts."""
        ends = np.cumsum(counts) - counts + len(counts) - 1
        return sent(ends, np.int64, self.device)

    def arrive(self, rolled: Rolled, lengths: Mapping[Slot, int]) -> bool:
        self.drop(rolled)
        held = dict(zip(rolled.slots, rolled.pages, strict=True))
        for slot, length in lengths.items():
            end = length + rolled.steps - 1
            used = -(-end // self.pages.page_size)
            if not self.pages.make_room(slot, end) or self.pages.leases[slot].pages[:used] != held.get(slot, [])[:used]:
                return False
        for slot, length in lengths.items():
            self._advance(slot, length + rolled.steps - 1)
        return True

    def drop(self, rolled: Rolled) -> None:
        for slot in rolled.slots:
            if slot in self.pages.leases:
                self.pages.leases[slot].written = 0

    def _can_roll(self, slots: Sequence[Slot], ends: Sequence[int]) -> bool:
        if self.strict or len(slots) > GRAPH_ROWS[-1] or max(ends) > self.info.context:
            return False
        return all(self.pages.make_room(slot, end) for slot, end in zip(slots, ends, strict=True))

    def _roll(
        self,
        slots: list[Slot],
        starts: list[int],
        tokens: Any,
        by: torch.Tensor | None,
        most: int,
        steps: int,
        drawing: Drawing,
    ) -> None:
        """All steps but the first, one token of each slot at a time. by: how far behind `starts` they are."""
        count, size = len(slots), self.info.vocab_size
        once = [1] * count
        with torch.inference_mode(), on(self.device):
            spans = Spans(slots, starts, once, once, tokens)
            program = self._stage(spans, _whole(once), (), ahead=most + steps - 2).program
            self._staged = None
            program.run(tokens, by=by)
            self._record(program)
            for _ in range(steps - 2):
                program.run_on(drawing.step(program.logits[:count, :size]), self._ones[:count])
            drawing.step(program.logits[:count, :size])

    def _score(self, spans: Spans, hidden: Sequence[int]) -> Scored:
        return (self._score_strictly if self.strict else self._score_once)(spans, hidden)

    def _score_once(self, spans: Spans, hidden: Sequence[int]) -> Scored:
        """Everything in one pass."""
        is_long = [count > LONG and index not in spans.parents for index, count in enumerate(spans.counts)]
        if not any(is_long) and sum(spans.counts) <= GRAPH_ROWS[-1]:
            return self._score_pieces(spans, _whole(spans.counts), spans.tokens, hidden)
        return self._score_prompts(spans, is_long, hidden)

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
        states = {layer: program.states[layer][:total].clone() for layer in hidden}
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

    def _look_ahead(self, spans: Spans, hidden: tuple[int, ...]) -> None:
        """After single tokens mostly the next ones follow: their pass is written down while the device is busy."""
        count = len(spans.slots)
        if spans.parents or not sum(spans.counts) == sum(spans.rows) == count:
            return
        expected = tuple(
            place for place in spans.goes_on if self.pages.make_room(spans.slots[place], spans.starts[place] + 2)
        )
        places = expected or range(count)
        slots, starts = [spans.slots[place] for place in places], [spans.starts[place] + 1 for place in places]
        held = [len(self.pages.leases[slot].pages) * self.pages.page_size for slot in slots]
        if len(slots) > (STRICT_ROWS if self.strict else GRAPH_ROWS[-1]) or not all(map(int.__lt__, starts, held)):
            return
        once = [1] * len(slots)
        self._staged = self._stage(Spans(slots, starts, once, once, None), _whole(once), hidden)
        self._expected = expected

    def foresee(self, chosen: torch.Tensor) -> None:
        """The tokens that were just chosen, on the device: where plain decoding goes on, the pass that feeds them is
        queued at once, and the host's work for a round costs nothing. If something else is fed after all, what this
        wrote lies beyond its sequence's length, and is written over.
        """
        staged, expected, self._expected = self._staged, self._expected, ()
        if staged is None or not expected or expected[-1] >= len(chosen):
            return
        if staged.program.is_recorded or not self._has_graphs:
            with torch.inference_mode(), on(self.device):
                tokens = chosen if len(expected) == len(chosen) else chosen[self._index(expected)]
                staged.program.run(tokens.clamp(min=0))  # -1 is a row without a token: nobody will go on there
            self._queued, self._staged = Queued(staged, expected, chosen), None

    def _take_queued(self, spans: Spans, hidden: tuple[int, ...]) -> dict[int, int]:
        """Which spans of a pass were computed before anybody asked: their places there. The host knows by now what was
        chosen, and so what was fed."""
        queued, self._queued = self._queued, None
        known = self.ops.known if isinstance(self.ops, DeviceSampling) else None
        if queued is None or known is None or known[0] is not queued.chosen:
            return {}
        staged = queued.staged
        if staged.hidden != hidden or staged.program.work.holder is not staged.program:
            return {}
        fed, tokens, done = known[1].tolist(), spans.tokens.tolist(), {}
        places, ends = {slot: place for place, slot in enumerate(staged.slots)}, accumulate(spans.counts)
        for index, (slot, end) in enumerate(zip(spans.slots, ends, strict=True)):
            place = places.get(slot)
            if place is None or spans.counts[index] != 1 or spans.starts[index] != staged.starts[place]:
                continue
            pages = staged.pages[place]
            if tokens[end - 1] == fed[queued.rows[place]] and self.pages.leases[slot].pages[: len(pages)] == pages:
                done[index] = place
        self._done = staged.program
        return done

    def _score_rest(self, spans: Spans, hidden: Sequence[int], done: Mapping[int, int]) -> Scored:
        """A pass of which some spans are done: those that are not, and all of it together."""
        program, places = self._done, self._index(tuple(done.values()))
        assert program is not None, "something is done, so there is a program that did it"
        ours = program.logits[places], {layer: program.states[layer][places] for layer in hidden}
        rest = [index for index in range(len(spans.slots)) if index not in done]
        if not rest:
            return ours
        firsts = [end - count for end, count in zip(accumulate(spans.counts), spans.counts, strict=True)]
        fed = [firsts[index] + at for index in rest for at in range(spans.counts[index])]
        some = Spans(
            [spans.slots[index] for index in rest],
            [spans.starts[index] for index in rest],
            [spans.counts[index] for index in rest],
            [spans.rows[index] for index in rest],
            spans.tokens[np.asarray(fed)],
            {at: spans.parents[index] for at, index in enumerate(rest) if index in spans.parents},
            later=None if spans.later is None else ([fed.index(place) for place in spans.later[0]], spans.later[1]),
        )
        logits, states = self._score(some, hidden)
        order = [*done, *rest]
        rows = torch.cat([ours[0], logits])[self._index(_back(order, spans.rows))]
        at = self._index(_back(order, spans.counts))
        return rows, {layer: torch.cat([ours[1][layer], states[layer]])[at] for layer in hidden}

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
        self._staged = self._queued = None
        pieces = _whole(spans.counts)
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

    def roller(self, head: EagleHead) -> HeadRoller | None:
        """Lets an EAGLE head that sits on this model guess on by itself."""
        if self.strict:
            return None
        return HeadRoller(head, self._model, graphs=self._has_graphs)

    def view(self, layers: int) -> GpuBackend:
        return FirstLayers(self, layers)


class FirstLayers(SequencesAhead, GpuBackend):
    """A model's first layers as a model of their own, for layer skip: the same weights, cache and slots."""

    def __init__(self, whole: GpuBackend, layers: int) -> None:
        self.__dict__.update(whole.__dict__)  # all of it is shared
        SequencesAhead.__init__(self, whole)
        self.weights = whole.weights._replace(layers=whole.weights.layers[:layers])
        self.info = replace(whole.info, name=f"{whole.info.name}, {layers} layers", num_hidden=0, heads=False)


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


def _back(order: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Blocks lie in this order: where the entries of block 0 are, of block 1, and so on."""
    first, at = {}, 0
    for block in order:
        first[block] = at
        at += sizes[block]
    return tuple(first[block] + entry for block, size in enumerate(sizes) for entry in range(size))


def _whole(counts: Sequence[int]) -> list[Piece]:
    return [Piece(index, 0, count) for index, count in enumerate(counts)]
