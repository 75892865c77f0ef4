"""Prompt lookup: where did the last n tokens of this request occur before, and what followed?

The longest n first, then the latest occurrence; a tree also tries what followed shorter n-grams. A request's index maps
each n-gram to the place after its latest occurrence; it grows by the new tokens only and is gone with the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.config import NgramConfig
from outrider.draft.base import DrafterInfo
from outrider.draft.certain import NOTHING, Lookup, LookupDrafter, Proposal
from outrider.types import Job

NUM_SHARES = 4  # a guess beside the main one gets one of so many shares of a tree
MOST_GUESSES = 3
LONGEST_MATCH = 16  # how far back it is looked how much of the text matches


class NgramDrafter(LookupDrafter):
    """Proposes what followed the last n tokens before, in the request's own text."""

    info = DrafterInfo(name="ngram", lookup=True)

    def __init__(self, config: NgramConfig | None = None) -> None:
        super().__init__()
        self.config = config or NgramConfig()

    def open(self, job: Job) -> Lookup:
        return NgramIndex(self.config)


class NgramIndex:
    """The n-grams of one request that have a continuation."""

    __slots__ = ("_config", "_ends", "_last", "_length")

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> the place after its latest occurrence
        self._length = 0  # tokens read
        self._last = 0  # the last of them

    def missing(self, tokens: list[int]) -> int:
        length = self._length
        if length and (length > len(tokens) or tokens[length - 1] != self._last):
            self._ends.clear()  # tokens were taken back, and what their n-grams replaced is not known any more
            length = self._length = 0
        return len(tokens) - length

    def read(self, tokens: list[int], stop: int) -> None:
        ends, sizes = self._ends, range(self._config.min_n, self._config.max_n + 1)
        for end in range(self._length, stop):
            for n in sizes:
                if n <= end:
                    ends[tuple(tokens[end - n : end])] = end
        self._length, self._last = stop, tokens[stop - 1]

    def propose(self, tokens: list[int], width: int, branching: bool) -> Proposal:
        """What followed the longest n-gram. What followed shorter ones, later, branches off where it differs."""
        starts: list[int] = []
        for n in range(min(self._config.max_n, len(tokens) - 1), self._config.min_n - 1, -1):
            start = self._ends.get(tuple(tokens[-n:]))
            if start is not None and start not in starts:
                if not branching or width < NUM_SHARES:
                    return Proposal(_continuation(tokens, start, width), matched=_matched(tokens, start, n))
                starts.append(start)
        if not starts:
            return NOTHING
        return _merged([_continuation(tokens, start, width) for start in starts[:MOST_GUESSES]], width)

    def close(self) -> None:
        pass


def _matched(tokens: list[int], start: int, known: int) -> int:
    """How many tokens before `start` are the last ones, `known` of which are."""
    most = min(start, LONGEST_MATCH)
    while known < most and tokens[start - known - 1] == tokens[-known - 1]:
        known += 1
    return known


def _continuation(tokens: list[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on. Past the end it goes on with what it has found itself: a loop repeats."""
    found = tokens[start : start + count]
    if len(found) < count:
        found = (found * -(-count // len(found)))[:count]
    return found


def _merged(guesses: Sequence[Sequence[int]], width: int) -> Proposal:
    """One tree of all guesses. The first is the main one: the others get a share each, as far as they need it."""
    share = width // NUM_SHARES
    depth = width - share * (len(guesses) - 1)
    tree = _Tree()
    tree.add(guesses[0], depth)
    for guess in guesses[1:]:
        tree.add(guess[:depth], share)
    tree.add(guesses[0], width - len(tree.tokens))
    return Proposal(tree.tokens, tree.parents if tree.branches else None)


class _Tree:
    """Guesses that share their beginnings."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.branches = False
        self._nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    def add(self, guess: Sequence[int], room: int) -> None:
        """Add at most `room` nodes of a guess that are not there yet."""
        at = -1
        for token in guess:
            node = self._nodes.get((at, token))
            if node is None:
                if room == 0:
                    return
                room -= 1
                node = self._nodes[at, token] = len(self.tokens)
                self.branches |= at != node - 1
                self.tokens.append(token)
                self.parents.append(at)
            at = node
