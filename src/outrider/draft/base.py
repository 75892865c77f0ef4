"""The drafter contract: what proposes tokens. Other models, heads, lookups and scripts all fit.

A proposal may depend on the past and on draft rows, never on the value drawn for a sampled token nor on noise that
verification will use: dropping a sampled token because it looks unlikely would break the law.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.types import Batch, Drafts, Job, Scores, Verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInfo:
    """What a drafter can do, as data; the engine checks it once when it is built.

    `hidden_layers` are the target's hidden states that `observe` reads (see `ModelInfo.num_hidden`). `lookup` drafters
    find text instead of computing it: their proposals are one-hot, cost next to nothing, and carry `Drafts.matched`, by
    which the controller cuts them. `run_ahead` drafters have `propose_ahead`. `prior` is the share of chains that were
    kept up to each position in an earlier measurement, such as a head's training.
    """

    name: str
    hidden_layers: tuple[int, ...] = ()
    lookup: bool = False
    run_ahead: bool = False
    prior: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "," in self.name:
            raise ConfigError(f"a drafter needs a name, a text without commas, got {self.name!r}", param="draft")


class Drafter(ABC):
    """Proposes up to `widths[b]` tokens for job b, in one call for the batch. Only `propose` must be written."""

    info: DrafterInfo

    @property
    def name(self) -> str:
        """The method, as requests name it."""
        return self.info.name

    @property
    def profile_name(self) -> str:
        """What its measured costs are kept under: the method, and the model that drafts."""
        return self.name

    @abstractmethod
    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        """The drafts of a round. Those of job b may branch if `trees[b]`; they need not.

        Fewer tokens than the width are fine; a reason goes into `fallbacks`.
        """

    def lag(self, job: Job) -> int:
        """Tokens it must still read before it can propose: nothing is proposed until then, and `observe` reads on."""
        return 0

    def observe(self, batch: Batch, scores: Scores, verdicts: Verdicts) -> int:
        """After every step, prefill chunks and width 0 too: jobs hold their new tokens. Rewind, catch up, learn.

        Returns the model passes it needed for that.
        """
        return 0

    def forget(self, job: Job) -> None:
        """The job is over: free what it held. Also called for jobs never seen."""

    def pause(self, job: Job) -> None:
        """The job was preempted and will come back: free what it holds in the caches of models."""
        self.forget(job)

    def propose_ahead(self, jobs: Sequence[Job], assumed: Sequence[int], widths: Sequence[int]) -> Drafts:
        """Chains for copies of jobs whose last `assumed[b]` tokens are not verified yet. Runs on a thread of its own,
        beside the target's pass; the next `observe` says what became of them. Only if `info.run_ahead`."""
        raise NotImplementedError(f"{self.name} does not run ahead")

    def reserve_ahead(self, job: Job, length: int) -> bool:
        """Whether `propose_ahead` may write up to `length` tokens of the job."""
        return True

    def take_stale(self) -> int:
        """Proposals that were dropped unverified since the last call, because the tokens before them were rejected."""
        return 0

    def close(self) -> None:
        """The engine is closed."""
