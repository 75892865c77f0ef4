"""Suffix matching: the longest end of a request's text that its tenant has seen before, and what followed how often.

Seen are this request's own text, the tenant's other running requests and its past ones (`past.Past`); nothing of other
tenants. What followed at the latest occurrences is counted place by place: a token's chance is its share of them, less a
little that shrinks as the text that agrees grows (one occurrence proves little after two tokens, much after twenty).
A proposal goes on while the chances along its path multiply to enough.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush

from outrider.config import SuffixConfig
from outrider.draft.certain import NOTHING, Lookup, LookupDrafter, Proposal
from outrider.draft.past import Past
from outrider.types import Job

Followed = list[list[int]]  # what followed at each occurrence, latest first
# A node that may come next: (-probability, turn, parent, depth, what followed there). Of equals the first to come, which
# is the latest text.
Bud = tuple[float, int, int, int, Followed]


class SuffixDrafter(LookupDrafter):
    """Proposes what most often followed the longest match, as far as the counts justify it."""

    name = "suffix"

    def __init__(self, config: SuffixConfig | None = None) -> None:
        super().__init__()
        self.config = config or SuffixConfig()
        self.past = Past(self.config)

    def open(self, job: Job) -> Lookup:
        return SuffixLookup(self.config, self.past, job.request.tenant)

    def reads(self, job: Job) -> bool:
        return True  # plain answers are past text too


class SuffixLookup:
    """One request's text, in the past of its tenant from the first token on."""

    __slots__ = ("_config", "_past", "_text")

    def __init__(self, config: SuffixConfig, past: Past, tenant: str) -> None:
        self._config = config
        self._past = past
        self._text = past.open(tenant)

    def missing(self, tokens: list[int]) -> int:
        text = self._text
        if text.length and (
            text.length > len(tokens) or tokens[text.length - 1] != text.last
        ):  # tokens were taken back
            self._past.drop(text)
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
        if branching and not _agree(followed):
            return self._tree(followed, matched, width)
        return Proposal(self._chain(followed, matched))

    def close(self) -> None:
        self._past.finish(self._text)

    def _chain(self, followed: Followed, matched: int) -> list[int]:
        """The most frequent token at every step; of equals the latest."""
        least, smoothing = self._config.min_probability, self._config.smoothing
        probability, depth = 1.0, 0
        while not _agree(followed):
            votes = [line[depth] for line in followed if len(line) > depth]
            token, count = votes[0], votes.count(votes[0])
            if count < len(votes):
                token = max(dict.fromkeys(votes), key=votes.count)
                count = votes.count(token)
            probability *= count / (len(votes) + smoothing / (matched + depth))
            if probability < least:
                return followed[0][:depth]
            if count < len(followed):
                followed = [line for line in followed if len(line) > depth and line[depth] == token]
            depth += 1
        line, doubt = followed[0], smoothing / len(followed)
        while depth < len(line):
            probability /= 1.0 + doubt / (matched + depth)
            if probability < least:
                break
            depth += 1
        return line[:depth]

    def _tree(self, followed: Followed, matched: int, width: int) -> Proposal:
        """The likeliest `width` nodes: the likeliest of all that may come next, again and again."""
        least, smoothing = self._config.min_probability, self._config.smoothing
        tokens: list[int] = []
        parents: list[int] = []
        coming: list[Bud] = []
        node, depth, probability, turn, num_turns = -1, 0, 1.0, 0, 0
        while True:
            if len(followed) == 1:
                probability /= 1.0 + smoothing / (matched + depth)
                if probability >= least and len(followed[0]) > depth:
                    heappush(coming, (-probability, turn, node, depth, followed))
            else:
                branches = _branches(followed, depth)
                share = probability / (sum(map(len, branches)) + smoothing / (matched + depth))
                for followed in branches:
                    if share * len(followed) >= least:
                        heappush(coming, (-share * len(followed), num_turns, node, depth, followed))
                        num_turns += 1
            if not coming or len(tokens) == width:
                break
            negative, turn, parent, depth, followed = heappop(coming)
            tokens.append(followed[0][depth])
            parents.append(parent)
            node, depth, probability = len(tokens) - 1, depth + 1, -negative
        return Proposal(tokens, parents if parents != [*range(-1, len(parents) - 1)] else None)


def _agree(followed: Followed) -> bool:
    return followed.count(followed[0]) == len(followed)


def _branches(followed: Followed, depth: int) -> Collection[Followed]:
    """What followed, grouped by the token at `depth`; where a text ended it says nothing."""
    branches: dict[int, Followed] = {}
    for line in followed:
        if len(line) > depth:
            branches.setdefault(line[depth], []).append(line)
    return branches.values()
