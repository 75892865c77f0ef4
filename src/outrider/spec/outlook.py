"""What drafting would bring a batch: in its next round, and over the rest of its answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from outrider.spec.acceptance import DEPTH, Acceptance
from outrider.spec.choose import Candidate, Choice, Setting, choose, weigh
from outrider.spec.cost_model import CostModel
from outrider.types import Batch, Job

STAY = 1.02  # times faster than plain decoding that drafting must be: less is lost as requests drift apart
HORIZON = 1024  # tokens of an answer that are counted on, whatever its limit is
FEW = 2  # unread tokens that are part of every proposal


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
        pooled: dict[tuple[str, int], list[float]] = {}  # most of a resting batch have no evidence of their own
        found = []
        for place, name in self.free.items():
            job_id, room = self.jobs[place].id, self._room[place]
            key = (name, min(room, DEPTH))
            reach = None if job_id in self._acceptance else pooled.get(key)
            if reach is None:
                reach = self._acceptance.reach(job_id, name, room, alone=len(self.jobs) == 1, doubt=doubt)
                if job_id not in self._acceptance:
                    pooled[key] = reach
            found.append(Candidate(place, reach))
        return found

    def setting(self, rows: int, *, growth: float = 0.0) -> Setting:
        """growth: of the context, until then."""
        costs, num_jobs, context, names = self.costs, len(self.jobs), self._context + growth, set(self.free.values())

        def seconds(drafted: int, rows_by_step: Sequence[float]) -> float:
            draft_s = max([costs.draft_s(name, rows_by_step) for name in names], default=0.0)
            return costs.pass_s(rows + drafted, num_jobs, context) + draft_s

        return Setting(num_jobs, seconds)

    def best(self, candidates: Sequence[Candidate], setting: Setting, token_s: float | None = None) -> Choice:
        """See `choose`."""
        return choose(candidates, setting, token_s, uniform=self._uniform)

    def later(self) -> Setting:
        """A steady round in the middle of what is left of the answers, whose contexts grow meanwhile."""
        return self.setting(self.rows, growth=self.tokens_left / 2)

    def gain_s(self, widths: Mapping[int, int], candidates: Sequence[Candidate]) -> float:
        """Seconds that the rest of the answers gains by these widths, catching up included."""
        later = self.later()
        drafting = weigh(widths, candidates, later)
        token_s = later.seconds(0, ()) / len(self.jobs) - STAY * drafting.seconds / drafting.tokens
        return self.tokens_left * token_s - self.entry_s(widths)

    def may_pay(self) -> bool:
        """Whether drafting would pay if every draft were kept."""
        certain = [Candidate(at, [1.0] * min(self._room[at], DEPTH)) for at in self.free]
        return self.gain_s(self.best(certain, self.later()).widths, certain) > 0.0

    def cheapest_probe(self, candidate: Candidate, fed: int, token_s: float) -> tuple[int, float, float]:
        """The width at which a draft for one request costs least for each token that it judges, what it costs beside a
        pass of `fed` rows, and how many tokens it is expected to judge."""
        setting, num_jobs, entry_s = self.setting(fed), len(self.jobs), self.entry_s([candidate.place])
        now_s, probes = setting.seconds(0, ()), list[tuple[float, int, float, float]]()
        judged = kept = 0.0
        for width, chance in enumerate(candidate.reach, 1):
            judged += candidate.reach[width - 2] if width > 1 else 1.0
            kept += chance if num_jobs == 1 else 0.0  # one request that ends earlier does not make a batch faster
            # the cost of a single row drowns in noise, so it is at least its share of a row for every request
            rows_s = max([(setting.seconds(width * jobs, ()) - now_s) / jobs for jobs in (1, num_jobs)])
            cost_s = max(0.0, rows_s + setting.seconds(0, (1,) * width) - now_s - kept * token_s) + entry_s
            probes.append((cost_s / judged, width, cost_s, judged))
        return min(probes)[1:]

    def entry_s(self, places: Collection[int]) -> float:
        """Seconds until the drafters of these jobs have caught up."""
        unread = sum([to_catch_up(self.jobs[at], self._unread) for at in places])
        return max([self.costs.read_s(self.free[at], unread, len(places)) for at in places], default=0.0)


def to_catch_up(job: Job, unread: Mapping[int, int]) -> int:
    """Tokens that the job's drafter must catch up on; a few are part of every proposal."""
    count = unread.get(job.id, job.num_prompt - 1)
    return count if count > FEW else 0
