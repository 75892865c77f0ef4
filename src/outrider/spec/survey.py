"""What a decision is made from: the batch, who may draft what for whom, and what that promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.spec.acceptance import JobRecord
from outrider.spec.choice import Batch, Group, Prospect, plain_rate
from outrider.spec.knowledge import Knowledge, starters
from outrider.types import Ask, Job

FIRST_WIDTH = 4  # tokens drafted as long as costs are unknown
SHORT = 16  # an answer with fewer tokens to come tries nothing new
CHEAP = 0.5  # of a row in the largest pass: who can catch up for that may start at once
LEAST_CHANCE = 0.01  # that a place must have of being kept, to be thought of
CHARGE = 1.0 / 16.0  # catching up is counted in such parts of a pass


class Offer(NamedTuple):
    """A drafter that may be asked for a job."""

    drafter: str
    width: int  # at most
    shift: int  # of the job's acceptance, see `JobRecord`
    entry: int  # what catching up costs this round, in units of CHARGE
    may_branch: bool
    must_branch: bool


class View(NamedTuple):
    """A job whose width is free: its place among the deciding, and who may draft."""

    place: int
    offers: tuple[Offer, ...]


@dataclass(slots=True)
class Situation:
    """What a decision is made from."""

    jobs: Sequence[Job]
    batch: Batch
    views: list[View]
    pass_s: float  # without the drafts that are to be chosen
    plain_rate: float  # tokens per second without them
    most_rows: float  # that a pass may have: not many times what was measured
    is_steady: bool  # nobody reads a prompt
    has_changed: bool  # a request is not what it was
    rate: float = 0.0  # of the best drafting
    is_saving: bool = False  # for a try that promises more than probes do

    def room(self, place: int) -> int:
        """Tokens that are to come for a job."""
        return self.jobs[place].limit - len(self.jobs[place].tokens)


class Survey:
    """Looks at what is `known`, for a decision about some jobs."""

    def __init__(self, known: Knowledge) -> None:
        self._known = known

    def look(self, jobs: Sequence[Job], rooms: Sequence[tuple[Ask, ...]], rows: int) -> Situation:
        """rooms, rows: as for `width.Controller.choose`."""
        known, has_changed = self._known, False
        known.look(jobs)
        fed = rows + sum([len(job.tokens) - job.cached for job in jobs])
        batch, pass_s = Batch(float(fed), float(len(jobs))), known.passes.seconds(fed)
        views: list[View] = []
        begun: dict[str, int] = {}  # jobs that begin with a drafter that is not known yet
        for place, (job, room) in enumerate(zip(jobs, rooms, strict=True)):
            if not room:
                continue
            records = [known.record(job, ask.drafter) for ask in room]
            for record in records:
                if record.look(len(job.tokens)):
                    has_changed = True
                    known.budget.encourage()
            if job.width is not None:
                self._add_fixed(batch, room[0], records[0])
                continue
            offers = [
                self._offer(job, ask, record, pass_s)
                for ask, record in zip(room, records, strict=True)
                if (known.knows_plain and known.knows_steps(ask.drafter))
                or self._may_start(job, ask.drafter, begun, len(jobs))
            ]
            views.append(View(place, tuple(offers)))
        rate = plain_rate(batch, known.plain_s, known.draft_s)
        most_rows = max(2.0 * known.passes.largest, batch.rows + FIRST_WIDTH * len(jobs))
        pass_s = known.passes.seconds(batch.rows)
        return Situation(jobs, batch, views, pass_s, rate, most_rows, fed == len(jobs), has_changed)

    def _add_fixed(self, batch: Batch, ask: Ask, record: JobRecord) -> None:
        """A job whose width is fixed is part of the batch as it is."""
        drafter = self._known.drafter(ask.drafter, ask.tree and ask.drafter not in self._known.chains_only)
        places = max(1, round(ask.width / drafter.nodes))
        batch.tokens += sum(drafter.outlook(record.shift, places))
        batch.rows += ask.width
        steps = batch.steps.setdefault(ask.drafter, [])
        steps += [0.0] * (places - len(steps))
        for place in range(places):
            steps[place] += drafter.nodes

    def _may_start(self, job: Job, name: str, begun: dict[str, int], num_jobs: int) -> bool:
        """A drafter that nothing is known of begins with a few jobs."""
        known = self._known
        if job.limit - len(job.tokens) < SHORT:
            return False
        begun[name] = begun.get(name, 0) + 1
        if begun[name] <= starters(num_jobs):
            return True
        largest = known.passes.largest
        row_s = known.passes.seconds(largest) / largest if largest else 0.0
        return known.knows_drafter(name) and known.read_s(job, name) < CHEAP * row_s

    def _offer(self, job: Job, ask: Ask, record: JobRecord, pass_s: float) -> Offer:
        known = self._known
        width = ask.width if known.passes.is_known else min(ask.width, FIRST_WIDTH)
        # Catching up is spread over what is left of the answer, about two tokens a round
        entry_s = known.read_s(job, ask.drafter) * min(1.0, 2.0 / max(1, job.limit - len(job.tokens)))
        branches = ask.tree and ask.drafter not in known.chains_only
        must_branch = branches and bool(job.tree)
        may_branch = must_branch or (branches and ask.drafter not in known.longest)
        if not must_branch:
            width = min(width, known.longest.get(ask.drafter, width))
        return Offer(ask.drafter, width, record.shift, round(entry_s / (CHARGE * pass_s)), may_branch, must_branch)

    def groups(self, now: Situation, *, trees: bool, views: Sequence[View] | None = None) -> list[Group]:
        """Jobs that promise the same, together."""
        groups: dict[tuple[Offer, ...], Group] = {}
        for place, offers in now.views if views is None else views:
            group = groups.get(offers)
            if group is not None:
                group.members.append(place)
            elif offers:
                prospects = {offer.drafter: self._prospect(offer, trees, now.pass_s) for offer in offers}
                groups[offers] = Group([place], prospects)
        return list(groups.values())

    def _prospect(self, offer: Offer, trees: bool, pass_s: float) -> Prospect:
        drafter = self._known.drafter(offer.drafter, offer.must_branch or (trees and offer.may_branch))
        places = max(1, int(offer.width / drafter.nodes))
        chances = drafter.outlook(offer.shift, places)
        while len(chances) > 1 and chances[-1] < LEAST_CHANCE:  # a copy: what is known stays
            chances.pop()
        reach = drafter.reach(len(chances))
        return Prospect(chances, reach, drafter.answers, drafter.nodes, offer.entry * CHARGE * pass_s)
