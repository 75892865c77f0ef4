"""How likely drafts are kept: a decayed Beta for each (drafter, position), pooled over requests and for each request.

A request starts from the pool and moves away from it as its own tokens are verified. Lookups are told apart by the
length of the match as well: one matching token proves little, twenty nearly everything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import exp, lgamma, sqrt

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

    def fade(self, share: float) -> None:
        """Evidence counts for a share of what it did; means stay."""
        self.kept = [share * kept for kept in self.kept]
        self.verified = [share * verified for verified in self.verified]

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
        self._pools: dict[tuple[str, int], Positions] = {}
        self._own: dict[int, dict[tuple[str, int], Positions]] = {}  # by job id

    def reach(
        self,
        job_id: int,
        drafter: str,
        width: int,
        *,
        alone: bool,
        matched: int | None = None,
        doubt: float = 0.0,
        least: float = LEAST_CHANCE,
    ) -> list[float]:
        """For each position the probability that a chain is kept up to and including it, as far as that is worth a row.

        alone: whether the request decodes alone. matched: of a lookup, the tokens that match before the proposal.
        doubt: standard deviations by which acceptance may well be worse than expected.
        """
        width = min(width, DEPTH)
        key = (drafter, _match_class(matched))
        means = self._pool_means(drafter, key, width)
        own, pool = self._own.get(job_id, {}).get(key), self._pools.get(key)
        strength = OWN_STRENGTH if alone else OWN_STRENGTH_BATCH
        chances, reached, before = [], 1.0, None
        for position, mean in enumerate(means):
            if own is not None:  # later positions are like the pool's and like the request's earlier ones
                guess = mean if before is None else 0.5 * (mean + before)
                mean = before = own.mean(position, guess, strength)
            if doubt:
                evidence = POOL_STRENGTH + (pool.verified[position] if pool is not None else 0.0)
                if own is not None:
                    evidence = own.verified[position] + min(strength, evidence)
                mean = min(1.0, max(0.0, mean - doubt * sqrt(mean * (1.0 - mean) / evidence)))
            reached *= mean
            chances.append(reached)
            if reached < least:
                break
        return chances

    def add(
        self,
        job_id: int | None,
        drafter: str,
        chains: Sequence[tuple[int, int]],
        matched: int | None = None,
        *,
        outdated: float = 0.0,
        overlapping: bool = False,
    ) -> None:
        """Chains were judged, of which so many tokens were (accepted, drafted). job_id: None where the request's width
        is fixed anyway. outdated: the chance that acceptance has changed since it was last seen. overlapping: they
        begin at each token of a text."""
        records = self._records(job_id, drafter, matched)
        judged = [(min(accepted, DEPTH), min(drafted, DEPTH)) for accepted, drafted in chains]
        if outdated and judged:
            alone = judged if not overlapping else [(min(accepted, 1), 1) for accepted, _ in judged]
            self._forget(records, outdated, self._likelihood(job_id, drafter, alone), alone)
        for accepted, drafted in judged:
            # of chains that overlap, each counts as old as the text that it does not share
            share = 1.0 / (1 + accepted) if overlapping else 1.0
            for record, decay in records:
                record.add(accepted, drafted, decay**share)

    def _likelihood(self, job_id: int | None, drafter: str, chains: Sequence[tuple[int, int]]) -> float:
        """How likely these chains are, as far as acceptance is known."""
        longest = max([drafted for _, drafted in chains])
        chances = [1.0, *self.reach(-1 if job_id is None else job_id, drafter, longest, alone=False, least=0.0)]
        likelihood = 1.0
        for accepted, drafted in chains:
            likelihood *= chances[accepted] - (chances[accepted + 1] if accepted < drafted else 0.0)
        return max(0.0, likelihood)

    def _forget(
        self,
        records: Sequence[tuple[Positions, float]],
        outdated: float,
        as_known: float,
        chains: Sequence[tuple[int, int]],
    ) -> None:
        """Old evidence counts for less, the better the chains fit a change, after which any acceptance is as likely."""
        right, wrong = sum([one for one, _ in chains]), sum([accepted < drafted for accepted, drafted in chains])
        unknown = exp(lgamma(right + 1) + lgamma(wrong + 1) - lgamma(right + wrong + 2))
        changed = outdated * unknown / (outdated * unknown + (1.0 - outdated) * as_known)
        for record, _ in records:
            record.fade(1.0 - changed)

    def _records(self, job_id: int | None, drafter: str, matched: int | None) -> list[tuple[Positions, float]]:
        key = (drafter, _match_class(matched))
        records = [(self._pools.setdefault(key, Positions()), POOL_DECAY)]
        if job_id is not None:
            records.append((self._own.setdefault(job_id, {}).setdefault(key, Positions()), OWN_DECAY))
        return records

    def evidence(self, drafter: str) -> float:
        """First tokens of chains that were judged, old ones counting for less."""
        pool = self._pools.get((drafter, _match_class(None)))
        return 0.0 if pool is None else pool.verified[0]

    def prior_reach(self, drafter: str, width: int) -> list[float]:
        """The reach of a drafter of which nothing was judged yet."""
        chances, reached = list[float](), 1.0
        for mean in self._prior_means(drafter, -1, min(width, DEPTH)):
            reached *= mean
            chances.append(reached)
            if reached < LEAST_CHANCE:
                break
        return chances

    def forget(self, job_id: int) -> None:
        self._own.pop(job_id, None)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._own

    def _pool_means(self, drafter: str, key: tuple[str, int], width: int) -> list[float]:
        """The pool's acceptance at each position: what was seen there, the drafter's prior, or the mean of all."""
        pool, prior = self._pools.get(key), self._priors.get(drafter, ())
        guess = FIRST_GUESS if key[1] < 0 else FIRST_MATCH_GUESSES[key[1]]
        if pool is None:
            return self._prior_means(drafter, key[1], width)
        mean, means = pool.overall(guess), list[float]()
        for position in range(width):
            if position < len(prior):
                mean = pool.mean(position, prior[position], PRIOR_STRENGTH)
            else:  # like the position before it, the first one like all
                mean = pool.mean(position, mean, POSITION_STRENGTH)
            means.append(mean)
        return means

    def _prior_means(self, drafter: str, match_class: int, width: int) -> list[float]:
        """The acceptance at each position before anything was judged."""
        prior = self._priors.get(drafter, ())
        guess = FIRST_GUESS if match_class < 0 else FIRST_MATCH_GUESSES[match_class]
        return [*prior[:width], *[prior[-1] if prior else guess] * (width - len(prior))]


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
