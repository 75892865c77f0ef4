"""How likely drafts are kept: a decayed Beta for each (drafter, position), pooled over requests and for each request.

A request starts from the pool and moves away from it as its own tokens are verified. Lookups are told apart by the
length of the match as well: one matching token proves little, twenty nearly everything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import sqrt

from outrider.draft.base import DrafterInfo

DEPTH = 16  # positions that are told apart
LEAST_CHANCE = 0.02  # of a position to be reached: less is never worth a row
POOL_DECAY = 0.995
OWN_DECAY = 0.97
FIRST_GUESS = 0.75  # acceptance of a drafter of which nothing is known
POOL_STRENGTH = 4.0  # verified tokens that a guess for the pool counts for
POSITION_STRENGTH = 12.0  # verified tokens that the mean of a position counts for, at the next one
PRIOR_STRENGTH = 40.0  # the same, where the drafter brings a measured prior
OWN_STRENGTH = 10.0  # verified tokens that the pool counts for, for one request decoding alone
OWN_STRENGTH_BATCH = 60.0  # the same in a batch: widths that differ by noise leave stragglers
MATCHES = (2, 3, 4, 6, 8, 12, 16)  # lengths of lookup matches where a class begins; the first has all below
FIRST_MATCH_GUESSES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9)

Key = tuple[str, int]  # drafter, class of the match


class Positions:
    """A decayed Beta for each position of a chain: tokens kept and verified there."""

    __slots__ = ("kept", "verified")

    def __init__(self) -> None:
        self.kept = [0.0] * DEPTH
        self.verified = [0.0] * DEPTH

    def add(self, accepted: int, drafted: int, decay: float) -> None:
        """`accepted` leading tokens of `drafted` were kept; the next one was rejected, if there was one. Behind that
        nothing was learned, and what is known of those positions fades: it is from when they were reached."""
        kept, verified = self.kept, self.verified
        for position in range(min(drafted, DEPTH)):
            kept[position] = kept[position] * decay + (position < accepted)
            verified[position] = verified[position] * decay + (position <= accepted)

    def mean(self, position: int, guess: float, strength: float) -> float:
        """The expected acceptance at a position."""
        return (self.kept[position] + guess * strength) / (self.verified[position] + strength)

    def overall(self, guess: float) -> float:
        """The expected acceptance at any position."""
        return (sum(self.kept) + guess * POOL_STRENGTH) / (sum(self.verified) + POOL_STRENGTH)


class Acceptance:
    """What was learned of every drafter, and of every request by it."""

    def __init__(self, drafters: Iterable[DrafterInfo]) -> None:
        self._priors = {info.name: _conditional(info.prior) for info in drafters}
        self._pools: dict[Key, Positions] = {}
        self._own: dict[int, dict[Key, Positions]] = {}  # by job id

    def reach(
        self, job_id: int, drafter: str, width: int, *, alone: bool, matched: int | None = None, doubt: float = 0.0
    ) -> list[float]:
        """For each position the probability that a chain is kept up to and including it, as far as that is worth a row.

        alone: whether the request decodes alone. matched: of a lookup, the tokens that match before the proposal.
        doubt: standard deviations by which acceptance may be worse than expected; negative, by which it may be better.
        """
        key = (drafter, _match_class(matched))
        own, pool = self._own.get(job_id, {}).get(key), self._pools.get(key, _NOTHING)
        strength = OWN_STRENGTH if alone else OWN_STRENGTH_BATCH
        chances, reached, before = [], 1.0, None
        for position, mean in enumerate(self._pool_means(drafter, key, pool, min(width, DEPTH))):
            evidence = POOL_STRENGTH + pool.verified[position]
            if own is not None:  # later positions are like the pool's and like the request's earlier ones
                guess = mean if before is None else 0.5 * (mean + before)
                mean = before = own.mean(position, guess, strength)
                evidence = own.verified[position] + min(strength, evidence)
            if doubt:
                mean = min(1.0, max(0.0, mean - doubt * sqrt(mean * (1.0 - mean) / evidence)))
            reached *= mean
            chances.append(reached)
            if reached < LEAST_CHANCE:
                break
        return chances

    def add(
        self, job_id: int | None, drafter: str, chains: Sequence[tuple[int, int]], matched: int | None = None
    ) -> None:
        """Chains were verified, of which so many tokens were (accepted, drafted). job_id: None where the request's
        width is fixed, which teaches the pool alone."""
        key = (drafter, _match_class(matched))
        records = [(self._pools.setdefault(key, Positions()), POOL_DECAY)]
        if job_id is not None:
            records.append((self._own.setdefault(job_id, {}).setdefault(key, Positions()), OWN_DECAY))
        for accepted, drafted in chains:
            for record, decay in records:
                record.add(accepted, drafted, decay)

    def fade(self, drafter: str, share: float) -> None:
        """Nothing of the drafter was verified for a while, and texts change: what is known of it counts for less."""
        for records in (self._pools, *self._own.values()):
            for (name, _), one in records.items():
                if name == drafter:
                    one.kept = [share * kept for kept in one.kept]
                    one.verified = [share * verified for verified in one.verified]

    def evidence(self, drafter: str) -> float:
        """First tokens of chains that were verified, old ones counting for less."""
        return self._pools.get((drafter, _match_class(None)), _NOTHING).verified[0]

    def forget(self, job_id: int) -> None:
        self._own.pop(job_id, None)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._own

    def _pool_means(self, drafter: str, key: Key, pool: Positions, width: int) -> list[float]:
        """The pool's acceptance at each position: what was seen there, the drafter's prior, or the mean of all."""
        prior = self._priors.get(drafter, ())
        guess = prior[-1] if prior else FIRST_GUESS if key[1] < 0 else FIRST_MATCH_GUESSES[key[1]]
        mean, means = pool.overall(guess), list[float]()
        for position in range(width):
            if position < len(prior):
                mean = pool.mean(position, prior[position], PRIOR_STRENGTH)
            else:  # like the position before it, the first one like all
                mean = pool.mean(position, mean, POSITION_STRENGTH)
            means.append(mean)
        return means


_NOTHING = Positions()  # nothing is ever added to it


def _match_class(matched: int | None) -> int:
    """-1 for drafters that compute."""
    return -1 if matched is None else bisect_right(MATCHES, matched)


def _conditional(shares: Sequence[float]) -> list[float]:
    """From the share of chains kept up to each position to the acceptance at each position."""
    before, means = 1.0, []
    for share in shares:
        means.append(min(1.0, share / before) if before > 0.0 else 0.0)
        before = share
    return means
