"""How likely drafts are kept: a decayed Beta for each (drafter, position), pooled over requests and for each request.

A request starts from the pool and moves away from it as its own tokens are verified. Lookups are told apart by the
length of the match as well: one matching token proves little, twenty nearly everything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from outrider.draft.base import DrafterInfo

DEPTH = 16  # positions that are told apart
POOL_DECAY = 0.995
OWN_DECAY = 0.97
ROUND_DECAY = 0.99  # of evidence, for each round in which a drafter rests
FIRST_GUESS = 0.75  # acceptance of a drafter of which nothing is known
POOL_STRENGTH = 4.0  # verified tokens that a guess for the pool counts for
PRIOR_STRENGTH = 40.0  # the same, where the drafter brings a measured prior
OWN_STRENGTH = 10.0  # verified tokens that the pool counts for, for one request decoding alone
OWN_STRENGTH_BATCH = 60.0  # the same in a batch: widths that differ by noise leave stragglers
MATCHES = (2, 3, 4, 6, 8, 12, 16)  # lengths of lookup matches where a class begins; the first has all below
FIRST_MATCH_GUESSES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9)


class Beta:
    """Kept and rejected tokens, decayed."""

    __slots__ = ("kept", "rejected")

    def __init__(self, kept: float = 0.0, rejected: float = 0.0) -> None:
        self.kept, self.rejected = kept, rejected

    def add(self, is_kept: bool, decay: float) -> None:
        self.fade(decay)
        if is_kept:
            self.kept += 1.0
        else:
            self.rejected += 1.0

    def fade(self, share: float) -> None:
        self.kept *= share
        self.rejected *= share

    def mean(self, prior: float, strength: float) -> float:
        return (self.kept + prior * strength) / (self.kept + self.rejected + strength)


class Positions:
    """A Beta for each position of a chain; later positions start from what the earlier ones showed."""

    __slots__ = ("betas",)

    def __init__(self) -> None:
        self.betas = [Beta() for _ in range(DEPTH)]

    def add(self, accepted: int, drafted: int, decay: float) -> None:
        """`accepted` leading tokens of `drafted` were kept; the next one was rejected, if there was one."""
        for position in range(min(drafted, accepted + 1, DEPTH)):
            self.betas[position].add(position < accepted, decay)

    def means(self, guesses: Sequence[float], strength: float) -> list[float]:
        means: list[float] = []
        for beta, guess in zip(self.betas, guesses, strict=False):
            prior = guess if not means else 0.5 * (guess + means[-1])
            means.append(beta.mean(prior, strength))
        return means


class Acceptance:
    """What was learned of every drafter, and of every request by it."""

    def __init__(self, drafters: Iterable[DrafterInfo]) -> None:
        self._priors = {info.name: _conditional(info.prior) for info in drafters}
        self._pools: dict[tuple[str, int], Positions] = {}
        self._num_verified: dict[str, int] = {}
        self._aged: dict[str, int] = {}  # drafter -> the round in which its evidence was last aged
        self._own: dict[int, dict[tuple[str, int], Positions]] = {}  # by job id

    def reach(self, job_id: int, drafter: str, width: int, *, alone: bool, matched: int | None = None) -> list[float]:
        """For each position the probability that a chain is kept up to and including it.

        alone: whether the request decodes alone. matched: of a lookup, the tokens that match before the proposal.
        """
        width = min(width, DEPTH)
        key = (drafter, _match_class(matched))
        means = self._pool_means(drafter, key, width)
        own = self._own.get(job_id, {}).get(key)
        if own is not None:
            means = own.means(means, OWN_STRENGTH if alone else OWN_STRENGTH_BATCH)
        chances, reached = [], 1.0
        for mean in means:
            reached *= mean
            chances.append(reached)
        return chances

    def add(self, job_id: int, drafter: str, accepted: int, drafted: int, matched: int | None = None) -> None:
        """A chain of `drafted` tokens was verified."""
        key = (drafter, _match_class(matched))
        self._num_verified[drafter] = self._num_verified.get(drafter, 0) + 1
        self._pools.setdefault(key, Positions()).add(accepted, drafted, POOL_DECAY)
        self._own.setdefault(job_id, {}).setdefault(key, Positions()).add(accepted, drafted, OWN_DECAY)

    def num_verified(self, drafter: str) -> int:
        """Chains of the drafter that were verified so far."""
        return self._num_verified.get(drafter, 0)

    def age(self, drafter: str, now: int) -> None:
        """Old evidence counts for less. now: rounds so far; those since the last call are what has passed."""
        key = (drafter, _match_class(None))
        passed = now - self._aged.get(drafter, now)
        self._aged[drafter] = now
        for positions in [self._pools.get(key), *[own.get(key) for own in self._own.values()]]:
            for beta in positions.betas if positions is not None else ():
                beta.fade(ROUND_DECAY**passed)

    def forget(self, job_id: int) -> None:
        self._own.pop(job_id, None)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._own

    def _pool_means(self, drafter: str, key: tuple[str, int], width: int) -> list[float]:
        pool, prior = self._pools.get(key), self._priors.get(drafter, ())
        strength = PRIOR_STRENGTH if prior else POOL_STRENGTH
        first = prior[0] if prior else FIRST_GUESS if key[1] < 0 else FIRST_MATCH_GUESSES[key[1]]
        means: list[float] = []
        for position in range(width):
            guess = prior[position] if position < len(prior) else means[-1] if means else first
            means.append(guess if pool is None else pool.betas[position].mean(guess, strength))
        return means


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
