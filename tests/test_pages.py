"""The account of pages: random lives of sequences against dense copies, the prefix cache, sharing, shortage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from outrider.kv.pages import Page, Pages, Usage
from outrider.types import Slot

SIZE = 4
TARGET, DRAFT = 0, 1


class Shelf:
    """A store of one number per place: which model wrote which token after which history."""

    def __init__(self, num_pages: int, size: int = SIZE) -> None:
        self.size = size
        self.places = np.full(num_pages * size, -1, dtype=np.int64)

    def copy_page(self, source: Page, target: Page) -> None:
        size = self.size
        self.places[target * size : (target + 1) * size] = self.places[source * size : (source + 1) * size]

    def move_places(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.places[list(targets)] = self.places[list(sources)]


def content(store: int, tokens: Sequence[int], index: int) -> int:
    """What a model keeps for the token at `index`: it depends on everything up to it, as keys and values do."""
    return hash((store, tuple(tokens[: index + 1]))) >> 3


class Dense:
    """One sequence without pages: what each store should hold."""

    def __init__(self, tokens: list[int], lengths: list[int], tenant: str) -> None:
        self.tokens, self.lengths, self.tenant = tokens, lengths, tenant

    def copy(self) -> Dense:
        return Dense(list(self.tokens), list(self.lengths), self.tenant)


class Lives(RuleBasedStateMachine):
    """Sequences of two models that share pages."""

    slots = Bundle("slots")
    num_steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(24, SIZE)
        self.shelves = [Shelf(24), Shelf(24)]
        for shelf in self.shelves:
            self.pages.add_store(shelf)
        self.dense: dict[Slot, Dense] = {}

    def write(self, slot: Slot, store: int, end: int) -> None:
        """The model reads the sequence's tokens up to `end`."""
        dense = self.dense[slot]
        start = dense.lengths[store]
        places = self.pages.places(slot, range(start, end))
        self.shelves[store].places[places] = [content(store, dense.tokens, index) for index in range(start, end)]
        self.pages.advance(slot, store, end)
        dense.lengths[store] = end

    @rule(
        target=slots,
        tokens=st.lists(st.integers(0, 1), max_size=20),
        extra=st.integers(0, 8),
        tenant=st.sampled_from(["", "b"]),
    )
    def open(self, tokens: list[int], extra: int, tenant: str) -> object:
        before, found = self.pages.usage, self.pages.match(tokens, tenant)
        assert self.pages.usage == before and (found < len(tokens) or not tokens)
        slot = self.pages.open(tokens, len(tokens) + extra, tenant)
        if slot is None:
            assert self.pages.usage == before
            return multiple()
        lengths = [self.pages.length(slot, store) for store in (TARGET, DRAFT)]
        assert lengths[TARGET] == found >= lengths[DRAFT] >= 0
        self.dense[slot] = Dense(list(tokens), lengths, tenant)
        return slot

    @rule(slot=slots, more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def score(self, slot: Slot, more: list[int]) -> None:
        """The target reads on: pending tokens, then new ones."""
        dense = self.dense[slot]
        before = self.pages.usage
        tokens = dense.tokens + more
        if not self.pages.make_room(slot, len(tokens)):
            assert self.pages.usage == before
            return
        dense.tokens = tokens
        self.write(slot, TARGET, len(tokens))

    @rule(slot=slots, ahead=st.integers(0, 3))
    def draft(self, slot: Slot, ahead: int) -> None:
        """The draft catches up, and runs ahead of the target with guesses of its own."""
        dense = self.dense[slot]
        end = dense.lengths[TARGET] + ahead
        if end <= dense.lengths[DRAFT] or not self.pages.make_room(slot, end):
            return
        dense.tokens = dense.tokens[: dense.lengths[TARGET]] + [1] * ahead if ahead else dense.tokens
        dense.lengths[DRAFT] = min(dense.lengths[DRAFT], dense.lengths[TARGET])
        self.pages.rewind(slot, DRAFT, dense.lengths[DRAFT])
        if self.pages.make_room(slot, end):
            self.write(slot, DRAFT, end)

    @rule(slot=slots, share=st.floats(0, 1), store=st.sampled_from([TARGET, DRAFT]))
    def rewind(self, slot: Slot, share: float, store: int) -> None:
        dense = self.dense[slot]
        length = int(share * dense.lengths[store])
        self.pages.rewind(slot, store, length)
        dense.lengths[store] = length
        if store == TARGET:
            dense.lengths = [min(held, length) for held in dense.lengths]
            del dense.tokens[length:]

    @rule(slot=slots, nodes=st.integers(1, 6), data=st.data())
    def keep(self, slot: Slot, nodes: int, data: st.DataObject) -> None:
        """The target scores a tree and keeps one path of it, which moves to consecutive places."""
        dense = self.dense[slot]
        start = dense.lengths[TARGET]
        if start < len(dense.tokens) or not self.pages.make_room(slot, start + nodes):
            return
        path = sorted(data.draw(st.sets(st.integers(0, nodes - 1))))
        kept = [index % 2 for index in path]
        # The places of a node hold what it would be in the sequence that keeps it; others hold something else.
        for node in range(nodes):
            [place] = self.pages.places(slot, [start + node])
            after = dense.tokens + kept[: path.index(node) + 1] if node in path else [9, node]
            self.shelves[TARGET].places[place] = content(TARGET, after, len(after) - 1)
        self.pages.advance(slot, TARGET, start + nodes)
        self.pages.move(slot, TARGET, [start + node for node in path], start)
        self.pages.rewind(slot, TARGET, start + len(path))
        dense.tokens += kept
        dense.lengths[TARGET] = start + len(path)
        dense.lengths[DRAFT] = min(dense.lengths[DRAFT], start)
        self.pages.rewind(slot, DRAFT, dense.lengths[DRAFT])

    @rule(slot=slots)
    def publish(self, slot: Slot) -> None:
        self.pages.publish(slot, self.dense[slot].tokens)

    @rule(target=slots, slot=slots)
    def fork(self, slot: Slot) -> object:
        before = self.pages.usage
        other = self.pages.fork(slot)
        if other is None:
            assert self.pages.usage == before
            return multiple()
        self.dense[other] = self.dense[slot].copy()
        return other

    @rule(slot=consumes(slots))
    def close(self, slot: Slot) -> None:
        self.pages.close(slot)
        del self.dense[slot]

    @invariant()
    def accounted_for(self) -> None:
        Lives.num_steps += 1
        self.pages.check()

    @invariant()
    def contents_are_those_of_a_dense_cache(self) -> None:
        for slot, dense in self.dense.items():
            for store, length in enumerate(dense.lengths):
                assert self.pages.length(slot, store) == length
                held = self.shelves[store].places[self.pages.places(slot, range(length))].tolist()
                assert held == [content(store, dense.tokens, index) for index in range(length)], (slot, store)

    def teardown(self) -> None:
        for slot in list(self.dense):
            self.close(slot)
        self.pages.check()
        usage = self.pages.usage
        assert usage.held == usage.promised == 0 and usage.free + usage.idle == 24, "a page leaked"


def test_random_lives_of_sequences() -> None:
    """10,000 steps and more, each followed by the whole check."""
    from hypothesis.stateful import run_state_machine_as_test

    Lives.num_steps = 0
    run_state_machine_as_test(Lives, settings=settings(max_examples=260, stateful_step_count=60))
    assert Lives.num_steps >= 10_000


def account(num_pages: int, stores: int = 1) -> Pages:
    pages = Pages(num_pages, SIZE)
    for _ in range(stores):
        pages.add_store(Shelf(num_pages))
    return pages


def fill(pages: Pages, tokens: Sequence[int], tenant: str = "", stores: Sequence[int] = (TARGET,)) -> Slot:
    """A sequence whose stores have read all its tokens, and which was published."""
    slot = pages.open(tokens, len(tokens), tenant)
    assert slot is not None and pages.make_room(slot, len(tokens))
    for store in stores:
        pages.advance(slot, store, len(tokens))
    pages.publish(slot, tokens)
    return slot


def test_a_hit_takes_full_pages_and_leaves_a_row() -> None:
    pages = account(8)
    fill(pages, range(10))
    assert pages.match(range(10)) == 8
    assert pages.match(range(8)) == 4, "all but one page: one row must be left to score"
    assert pages.match([0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    assert pages.match([9, *range(1, 10)]) == 0
    other = pages.open(range(10), 10)
    assert other is not None and pages.length(other, TARGET) == 8
    assert pages.usage == Usage(free=5, held=3, idle=0, promised=1)


def test_tenants_do_not_see_each_other() -> None:
    pages = account(8)
    pages.close(fill(pages, range(9), tenant="a"))
    assert pages.match(range(9), "a") == 8 and pages.match(range(9), "b") == 0 == pages.match(range(9))


def test_nothing_is_found_before_it_is_published_nor_beyond_what_was_written() -> None:
    pages = account(8)
    slot = pages.open(range(9), 9)
    assert slot is not None and pages.make_room(slot, 9)
    pages.advance(slot, TARGET, 6)
    assert pages.match(range(9)) == 0
    pages.publish(slot, range(9))  # only one page is written in full
    assert pages.match(range(9)) == 4


def test_a_draft_hits_only_what_it_has_read() -> None:
    pages = account(8, stores=2)
    pages.close(fill(pages, range(9), stores=[TARGET]))
    slot = pages.open(range(9), 9)
    assert slot is not None and (pages.length(slot, TARGET), pages.length(slot, DRAFT)) == (8, 0)
    assert pages.make_room(slot, 9)
    pages.advance(slot, TARGET, 9)
    pages.advance(slot, DRAFT, 9)  # it reads shared pages itself: no copy is needed, the values are everybody's
    assert pages.usage.held == 3
    pages.publish(slot, range(9))
    pages.close(slot)
    slot = pages.open(range(9), 9)
    assert slot is not None and (pages.length(slot, TARGET), pages.length(slot, DRAFT)) == (8, 8)


def test_the_least_recently_used_page_is_forgotten_first_and_ends_before_beginnings() -> None:
    pages = account(5)
    pages.close(fill(pages, [0] * 8))
    pages.close(fill(pages, [1] * 8))
    pages.close(fill(pages, [0] * 9))  # used again
    assert pages.usage == Usage(free=1, held=0, idle=4, promised=0)
    slot = pages.open((), 12)
    assert slot is not None and pages.make_room(slot, 8)
    assert (pages.match([0] * 9), pages.match([1] * 9)) == (8, 4)
    assert pages.make_room(slot, 12)
    assert (pages.match([0] * 9), pages.match([1] * 9)) == (8, 0)


def test_shortage_is_a_value_and_promises_are_kept() -> None:
    pages = account(4)
    first = pages.open((), 12)
    assert first is not None
    assert pages.open((), 8) is None, "three of four pages are promised"
    second = pages.open((), 4)
    assert second is not None and not pages.make_room(second, 8), "beyond its limit there is nothing for it"
    assert pages.make_room(second, 4) and pages.make_room(first, 12)
    pages.close(second)
    pages.advance(first, TARGET, 12)
    assert pages.fork(first) is not None, "a fork of full pages needs none yet"
    assert pages.usage == Usage(free=1, held=3, idle=0, promised=0)


def test_what_a_rewind_gives_back_stays_promised() -> None:
    pages = account(4)
    slot = pages.open((), 12)
    assert slot is not None and pages.make_room(slot, 12)
    pages.advance(slot, TARGET, 12)
    pages.rewind(slot, TARGET, 3)
    assert pages.usage == Usage(free=3, held=1, idle=0, promised=2)
    assert pages.open((), 8) is None and pages.make_room(slot, 12)


def test_a_trim_keeps_what_a_draft_holds_ahead_of_the_target() -> None:
    pages = account(8, stores=2)
    slot = pages.open((), 4)
    assert slot is not None and pages.make_room(slot, 24)
    pages.advance(slot, TARGET, 6)
    pages.advance(slot, DRAFT, 10)
    assert pages.trim(slot)
    assert pages.length(slot, TARGET) == 6 and pages.length(slot, DRAFT) == 10
    assert pages.usage.held == 3, "places 0 to 9, four to a page"
    assert not pages.trim(slot)
    pages.check()


@pytest.mark.parametrize("first", ["original", "fork"])
def test_after_a_fork_both_reach_their_limit_whoever_writes_first(first: str) -> None:
    pages = account(8)
    slot = pages.open((), 16)
    assert slot is not None and pages.make_room(slot, 6)
    pages.advance(slot, TARGET, 6)
    other = pages.fork(slot)
    assert other is not None
    assert pages.open((), 4) is None, "everything that is left is promised to the two"
    for one in (slot, other) if first == "original" else (other, slot):
        assert pages.make_room(one, 16)
        pages.advance(one, TARGET, 16)
    pages.check()


def test_a_draft_that_reads_again_after_a_rewind_is_found_again() -> None:
    """Publish, go back, write other tokens, publish: the hit is whole for the draft, too."""
    pages = account(12, stores=2)
    slot = fill(pages, range(12), stores=[TARGET, DRAFT])
    pages.rewind(slot, TARGET, 4)
    tokens = [*range(4), *range(20, 28)]
    assert pages.make_room(slot, 12)
    pages.advance(slot, TARGET, 12)
    pages.advance(slot, DRAFT, 12)
    pages.publish(slot, tokens)
    pages.close(slot)
    again = pages.open([*tokens, 1], 13)
    assert again is not None and (pages.length(again, TARGET), pages.length(again, DRAFT)) == (12, 12)


def test_going_back_into_a_published_page_copies_it() -> None:
    pages = account(6)
    slot = fill(pages, range(8))
    pages.rewind(slot, TARGET, 2)
    assert pages.make_room(slot, 3)
    pages.advance(slot, TARGET, 3)
    pages.check()
    assert pages.match(range(9)) == 8, "what was published is still what it was"


def test_a_slot_that_is_rewound_too_far_is_an_assertion() -> None:
    pages = account(4)
    slot = fill(pages, range(4))
    with pytest.raises(AssertionError, match=r"slot 0 holds \[4\] tokens, store 0 cannot go to 5"):
        pages.rewind(slot, TARGET, 5)
    pages.close(slot)
    with pytest.raises(KeyError):
        pages.close(slot)


@pytest.mark.parametrize("damage", ["lost", "twice", "promise"])
def test_check_finds_damage(damage: str) -> None:
    pages = account(4)
    fill(pages, range(6))
    if damage == "lost":
        pages._free.pop()
    elif damage == "twice":
        pages._free.append(pages.leases[Slot(0)].pages[0])
    else:
        pages._promised += 1
    with pytest.raises(AssertionError):
        pages.check()


def test_the_cost_of_an_operation_does_not_grow_with_the_pool() -> None:
    """Counted, not timed: a large pool with many sequences is touched only where something changes."""

    class Counting(list):  # type: ignore[type-arg]
        looked = 0

        def __getitem__(self, index: object) -> object:
            Counting.looked += 1
            return super().__getitem__(index)  # type: ignore[index]

        def __iter__(self) -> object:  # type: ignore[override]
            raise AssertionError("the whole pool was walked")

    pages = account(100_000)
    for start in range(2_000):
        fill(pages, [start] * 40)
    pages._holders = Counting(pages._holders)
    Counting.looked = 0
    slot = fill(pages, [7] * 60)
    pages.rewind(slot, TARGET, 45)
    fork = pages.fork(slot)
    assert fork is not None and pages.make_room(fork, 60)
    pages.close(fork)
    pages.close(slot)
    assert Counting.looked < 400
