"""What drafting would bring a batch: in its next round, and over the rest of its answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from outrider.spec.acceptance import Acceptance
from outrider.spec.choose import Candidate, Choice, Setting, choose_pairs, choose_uniform, weigh
from outrider.spec.cost_model import CostModel
from outrider.types import Batch, Job

OWN_WIDTHS = 1.05  # times better that widths of their own must be than equal ones: less is noise of estimates
STAY = 1.02  # times faster than plain decoding that drafting must be: less is lost as requests drift apart
HORIZON = 1024  # tokens of an answer that are counted on, whatever its limit is
FEW = 2  # unread tokens that are part of every proposal
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # that a device has one shape for


class Outlook:
    """`free` are the decode jobs whose width is free, by their place in the batch, and the drafter of each. `rows` are
    those of a steady pass without their drafts, `context` the tokens in the cache. `unread` are the tokens that
    drafters have not read, by job id."""

    def __init__(
        self,
        batch: Batch,
        free: Mapping[int, str],
        rows: int,
        context: int,
        costs: CostModel,
        acceptance: Acceptance,
        unread: Mapping[int, int],
        *,
        uniform: bool,
    ) -> None:
        self.jobs = batch.decode
        self.free = free
        self.rows = rows
        self.costs = costs
        self.tokens_left = sum([min(job.limit - len(job.tokens), HORIZON) for job in batch.decode])
        self._room = batch.room
        self._context = context
        self._acceptance = acceptance
        self._unread = unread
        self._uniform = uniform
        self.plain_s = self.setting(rows).seconds(0, ())

    def candidates(self, doubt: float = 0.0) -> list[Candidate]:
        """doubt: standard deviations by which acceptance is worse than it looks."""
        alone = len(self.jobs) == 1
        return [
            Candidate(at, self._acceptance.reach(self.jobs[at].id, name, self._room[at], alone=alone, doubt=doubt))
            for at, name in self.free.items()
        ]

    def prior_candidates(self) -> list[Candidate]:
        """As if nothing had been judged yet."""
        return [Candidate(at, self._acceptance.prior_reach(name, self._room[at])) for at, name in self.free.items()]

    def evidence(self) -> float:
        """Tokens that were judged of the drafter of which most is known."""
        return max([self._acceptance.evidence(name) for name in self.free.values()], default=0.0)

    def setting(self, rows: int, *, hopeful: bool = False, growth: float = 0.0) -> Setting:
        """hopeful: what no round has confirmed costs as little as it may. growth: of the context, until then."""
        costs, num_jobs, context, names = self.costs, len(self.jobs), self._context + growth, set(self.free.values())

        def seconds(drafted: int, rows_by_step: Sequence[float]) -> float:
            draft_s = max([costs.draft_s(name, rows_by_step, hopeful=hopeful) for name in names], default=0.0)
            return costs.pass_s(rows + drafted, num_jobs, context, hopeful=hopeful) + draft_s

        return Setting(num_jobs, seconds)

    def best(self, candidates: Sequence[Candidate], setting: Setting, token_s: float | None = None) -> Choice:
        """Equal widths, unless widths of their own are clearly better."""
        uniform = choose_uniform(candidates, setting, WIDTHS, token_s)
        if self._uniform or len(candidates) == 1:
            return uniform
        pairs = choose_pairs(candidates, setting, token_s)
        return pairs if pairs.gain(uniform, token_s) > OWN_WIDTHS else uniform

    def gain_s(self, widths: Mapping[int, int], candidates: Sequence[Candidate], *, hopeful: bool = False) -> float:
        """Seconds that the rest of the answers, whose contexts grow meanwhile, gains by these widths, catching up
        included."""
        later = self.setting(self.rows, hopeful=hopeful, growth=self.tokens_left / 2)
        drafting = weigh(widths, candidates, later)
        token_s = later.seconds(0, ()) / len(self.jobs) - STAY * drafting.seconds / drafting.tokens
        return self.tokens_left * token_s - self.entry_s(widths)

    def most_gain_s(self, candidates: Sequence[Candidate]) -> float:
        """What the best widths would gain, if acceptance were this and costs as low as they may be."""
        later = self.setting(self.rows, hopeful=True, growth=self.tokens_left / 2)
        widths = self.best(candidates, later).widths
        return max(0.0, self.gain_s(widths, candidates, hopeful=True)) if widths else 0.0

    def entry_s(self, places: Collection[int]) -> float:
        """Seconds until the drafters of these jobs have caught up."""
        unread = sum([to_catch_up(self.jobs[at], self._unread) for at in places])
        return max([self.costs.read_s(self.free[at], unread, len(places)) for at in places], default=0.0)


def to_catch_up(job: Job, unread: Mapping[int, int]) -> int:
    """Tokens that the job's drafter must catch up on; a few are part of every proposal."""
    count = unread.get(job.id, job.num_prompt - 1)
    return count if count > FEW else 0
