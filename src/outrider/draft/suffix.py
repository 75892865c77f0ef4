"""Suffix matching: the longest end of a request's text that its tenant has seen before, and what followed how often.

Seen are this request's own text, the tenant's other running requests and its past ones (`past.Past`); nothing of other
tenants. What followed at the latest occurrences is counted: a token's probability is its share of them, less a little
that shrinks as the matching text grows (one occurrence proves little after two tokens, much after twenty). A proposal
goes on while the probabilities along its path multiply to enough.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush

from outrider.config import SuffixConfig
from outrider.draft.base import DrafterInfo
from outrider.draft.certain import NOTHING, Lookup, LookupDrafter, Proposal
from outrider.draft.past import Past
from outrider.types import Job

Lines = list[list[int]]  # what followed at each occurrence, latest first


class Group:
    """Lines that agree so far. They go on to agree while `low` and `high` do."""

    __slots__ = ("high", "lines", "low")

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.low = min(lines)  # the shortest of all, where one is the beginning of the others
        self.high = max(lines)

    def split(self, depth: int) -> Collection[Lines]:
        """By the token at `depth`; where a text ended it says nothing."""
        branches: dict[int, Lines] = {}
        for line in self.lines:
            if len(line) > depth:
                branches.setdefault(line[depth], []).append(line)
        return branches.values()


# A node that may come next: (-probability, turn, parent, depth, what followed with it). Of equals the first to come,
# which is the latest text.
Bud = tuple[float, int, int, int, Group]


class SuffixDrafter(LookupDrafter):
    """Proposes what most often followed the longest match, as far as the counts justify it."""

    info = DrafterInfo(name="suffix", lookup=True)

    def __init__(self, config: SuffixConfig | None = None) -> None:
        super().__init__()
        self.config = config or SuffixConfig()
        self.past = Past(self.config)

    def open(self, job: Job) -> Lookup:
        tenant = job.request.tenant
        if job.is_repeatable:  # such a request looks at its own text only
            tenant = f"{tenant}\0{job.id}"
        return SuffixLookup(self.config, self.past, tenant)

    def reads(self, job: Job) -> bool:
        return True  # of the jobs in a pass with one that it drafts for; plain answers are past text too


class SuffixLookup:
    """One request's text, in the past of its tenant from the first token on."""

    __slots__ = ("_config", "_past", "_text")

    def __init__(self, config: SuffixConfig, past: Past, tenant: str) -> None:
        self._config = config
        self._past = past
        self._text = past.open(tenant)

    def missing(self, tokens: list[int]) -> int:
        text = self._text
        if text.length and (text.length > len(tokens) or tokens[text.length - 1] != text.last):
            self._past.rewind(text, tokens)
        return len(tokens) - text.length

    def read(self, tokens: list[int], stop: int) -> None:
        self._past.read(self._text, tokens, stop)

    def propose(self, tokens: list[int], width: int, branching: bool) -> Proposal:
        text, past = self._text, self._past
        matched, places = past.find(text.tenant, tokens)
        depth = min(width, int(matched * self._config.factor))
        if depth == 0:
            return NOTHING
        followed = past.after(places, depth)
        for index, line in enumerate(followed):
            if len(line) < depth and text.length == len(tokens) and past.text(places[index]) is text:
                followed[index] = (line * (depth // len(line) + 1))[:depth]  # up to the last token: a loop repeats
        borrowed = any(past.text(place) is not text for place in places)
        group = Group(followed)
        if branching and group.low != group.high:
            return self._tree(group, matched, width)._replace(borrowed=borrowed)
        return Proposal(self._chain(group, matched), matched=matched, borrowed=borrowed)

    def close(self) -> None:
        self._past.finish(self._text)

    def _chain(self, group: Group, matched: int) -> list[int]:
        """The most frequent token at every step; of equals the latest."""
        least, smoothing = self._config.min_probability, self._config.smoothing
        probability, depth = 1.0, 0
        while True:
            total = len(group.lines)
            if len(group.low) <= depth or group.low[depth] != group.high[depth]:
                branches = group.split(depth)
                if not branches:
                    break
                total = sum(map(len, branches))
                group = Group(max(branches, key=len))
            probability *= len(group.lines) / (total + smoothing / (matched + depth))
            if probability < least:
                break
            depth += 1
        return group.high[:depth]

    def _tree(self, group: Group, matched: int, width: int) -> Proposal:
        """The likeliest `width` nodes: the likeliest of all that may come next, again and again."""
        least, smoothing = self._config.min_probability, self._config.smoothing
        tokens: list[int] = []
        parents: list[int] = []
        coming: list[Bud] = []
        node, depth, probability, turn, num_turns = -1, 0, 1.0, 0, 1
        while True:
            if len(group.low) > depth and group.low[depth] == group.high[depth]:
                probability /= 1.0 + smoothing / len(group.lines) / (matched + depth)
                if probability >= least:
                    heappush(coming, (-probability, turn, node, depth, group))
            elif branches := group.split(depth):
                share = probability / (sum(map(len, branches)) + smoothing / (matched + depth))
                for lines in branches:
                    if share * len(lines) >= least:
                        heappush(coming, (-share * len(lines), num_turns, node, depth, Group(lines)))
                    num_turns += 1
            if not coming or len(tokens) == width:
                break
            negative, turn, parent, depth, group = heappop(coming)
            tokens.append(group.high[depth])
            parents.append(parent)
            node, depth, probability = len(tokens) - 1, depth + 1, -negative
        return Proposal(tokens, parents if parents != [*range(-1, len(parents) - 1)] else None)
