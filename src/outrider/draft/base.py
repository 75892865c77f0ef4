"""The drafter contract: whoever proposes tokens. Another model, lookups and scripts all fit.

A proposal may depend on the past and on draft rows, never on the value drawn for a sampled token nor on noise the
judge will use: dropping a sampled token because it looks unlikely would break the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.types import Drafts, Job, Plan, Scores, Verdicts


class Drafter(Protocol):
    """Proposes up to `widths[b]` tokens for job b, in one call for the batch."""

    @property
    def name(self) -> str:
        """The method, as requests name it."""

    @property
    def hidden(self) -> tuple[int, ...]:
        """Layers of the target's hidden states it wants to see in `observe` (`ModelInfo.num_hidden`); () for none."""

    def lag(self, job: Job) -> int:
        """Tokens it must still read before it can propose: the job's width is 0 until then, and `observe` reads on."""

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        """The drafts of a round. Those of job b may branch if `trees[b]`; they need not.

        Fewer tokens than the width are fine; a reason goes into `fallbacks`.
        """

    def observe(self, plan: Plan, scores: Scores, verdicts: Verdicts) -> int:
        """After every step, prompt chunks and width 0 too: jobs hold their new tokens. Rewind, catch up, learn.

        Returns the model passes it needed for that.
        """

    def forget(self, job: Job) -> None:
        """The job is over: free what it held. Also called for jobs never seen."""


class RunningAhead(Protocol):
    """A drafter that can go on drafting while the target judges its proposal (`run_ahead`). It depends on tokens only,
    not on the pass that is under way."""

    @property
    def runs_ahead(self) -> bool: ...

    def propose_ahead(self, jobs: Sequence[Job], assumed: Sequence[int], widths: Sequence[int]) -> Drafts:
        """Chains for copies of jobs whose last `assumed[b]` tokens are not judged yet. On a thread of its own; the next
        `observe` tells what became of them."""


class Priced(Protocol):
    """A drafter whose costs can be measured before it is asked for anything."""

    def draft_s(self, jobs: int, steps: int) -> float | None:
        """Seconds of chains of so many tokens for each of so many jobs; None where that cannot be measured. Who can
        tell what a token of a prompt takes to be read has a `read_s()`, too; whose chains of each length are built
        apart, `is_built_by_length`."""


class Promising(Protocol):
    """A drafter of which it is known from elsewhere how good it is: the engine need not find that out."""

    @property
    def promised(self) -> Sequence[float]:
        """The share of its chains that are kept up to each place."""


class LookingUp(Protocol):
    """A drafter whose proposals are found, not computed: certain, at next to no cost, and with `Drafts.matched`, by
    which the engine cuts them (`spec/lookups.py`)."""

    @property
    def looks_up(self) -> bool: ...


class Pausing(Protocol):
    """A drafter that keeps something of a job that gave its place up and will come back. Others are told `forget`."""

    def pause(self, job: Job) -> None:
        """Free what the job holds in the caches of models."""
