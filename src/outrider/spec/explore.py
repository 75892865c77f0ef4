"""Whether to look again, while drafting does not seem to pay, and how.

Plain decoding may be the wrong decision for two reasons. Acceptance or costs may be better than estimated: by a
standard deviation one time in six, so a look is worth a sixth of what the rest of the answers would gain by that. And
acceptance may have changed since the last look, the more likely the longer ago that is. A look every n rounds costs
look_s / n a round and notices a change n / 2 rounds late; the sum is least where both terms are equal.

There are three kinds of looks. By hindsight, the cheapest, a drafter reads the tokens it has not read and reports which
of them it would have drafted. Hindsight does not apply to drafts that are sampled and verified by rejection: there a
few requests draft. Where acceptance is known but no round had so many rows yet, all requests draft for one round, to
measure what the rows cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from outrider.spec.choose import Candidate, Setting, weigh
from outrider.spec.outlook import Outlook

BETTER = 0.16  # the chance that something is better than it looks by a standard deviation
UNCHANGED = 500.0  # rounds that acceptance stays what it is, as a rule
ENOUGH = 16  # emitted tokens that a look by hindsight judges
WORTH_A_LOOK = 8  # fewer are left to gather
MOST_ROWS = 16  # that a round drafts to find out what they cost, or as many as any round had


@dataclass(slots=True)
class Look:
    """What to do in this round to find out: requests (by place) that draft so much, or whose drafters are asked what
    they would have drafted. `wait`: rounds until there is enough to look at."""

    widths: dict[int, int] = field(default_factory=dict)
    hindsight: list[int] = field(default_factory=list)
    wait: int | None = None


class Explorer:
    """Decides on a look from the outlook of a round whose pass has `fed` rows.

    token_s: seconds of a token of plain decoding. rested: rounds since the last look. affordable: whether so many
    seconds may be lost.
    """

    def __init__(
        self, outlook: Outlook, fed: int, token_s: float, rested: int, affordable: Callable[[float], bool]
    ) -> None:
        self._outlook = outlook
        self._setting = outlook.setting(fed)
        self._token_s = token_s
        self._affordable = affordable
        self._known = outlook.evidence()
        self._if_better_s = BETTER * outlook.most_gain_s(outlook.candidates(doubt=-1.0))
        self._if_changed_s = 0.5 * rested / UNCHANGED * outlook.most_gain_s(outlook.prior_candidates())
        self._rested_share = rested * len(outlook.jobs) / max(1, outlook.tokens_left)  # of the rounds left

    def look(self, judgeable: Mapping[int, int]) -> Look:
        """judgeable: of requests (by place) of which hindsight tells, how many tokens it would judge."""
        if self._if_better_s + self._if_changed_s <= 0.0:
            return Look()
        full = self._unmeasured()
        if full:
            return self._measure(full)
        return self._by_hindsight(judgeable) if judgeable else self._by_probe()

    def _is_due(self, look_s: float, read_s: float, judged: float) -> bool:
        """Whether a look is worth what it takes, with reading before it. judged: tokens that it judges; the more are
        known already, the less do they say."""
        seconds = look_s + read_s
        is_worth = seconds <= self._if_better_s * (judged / (judged + self._known) if judged < inf else 1.0)
        is_time = seconds <= self._if_changed_s and look_s <= self._if_changed_s * self._rested_share
        return (is_worth or is_time) and self._affordable(seconds)

    def _unmeasured(self) -> dict[int, int]:
        """The widths that would pay, if no round had so many rows yet. Far beyond what was measured, costs are only
        guessed: they are tried step by step."""
        outlook, candidates = self._outlook, self._outlook.candidates()
        full = outlook.best(candidates, outlook.setting(outlook.rows, hopeful=True)).widths
        if not full or outlook.gain_s(full, candidates, hopeful=True) <= 0.0:
            return {}
        most = max(1, max(MOST_ROWS, outlook.costs.widest_seen) // len(full))
        full = {place: min(width, most) for place, width in full.items()}
        return {} if outlook.costs.has_seen(outlook.rows + sum(full.values())) else full

    def _measure(self, full: dict[int, int]) -> Look:
        """All draft, to see what so many rows cost."""
        round_ = weigh(full, self._outlook.candidates(), self._setting)
        loss_s = max(0.0, round_.seconds - round_.tokens * self._token_s)
        return Look(full) if self._is_due(loss_s, self._outlook.entry_s(full), inf) else Look()

    def _by_hindsight(self, judgeable: Mapping[int, int]) -> Look:
        """The cheapest requests that have enough to judge between them."""
        outlook, chosen, judged = self._outlook, list[int](), 0
        for place in self._cheapest_first(judgeable):
            if judged < ENOUGH:
                chosen.append(place)
                judged += judgeable[place]
        if judged < WORTH_A_LOOK:
            return Look(wait=max(1, -(-(WORTH_A_LOOK - judged) // len(chosen))))
        look_s = max([outlook.costs.draft_s(outlook.free[place], [len(chosen)]) for place in chosen])
        return Look(hindsight=chosen) if self._is_due(look_s, outlook.entry_s(chosen), judged) else Look()

    def _by_probe(self) -> Look:
        """A few requests draft, and are verified."""
        outlook, widths = self._outlook, dict[int, int]()
        by_place = {one.place: one for one in outlook.prior_candidates()}
        total_s = read_s = judged = 0.0
        for place in self._cheapest_first(outlook.free):
            entry_s = outlook.entry_s([place])
            width, loss_s = _cheapest(by_place[place], self._setting, self._token_s, entry_s)
            total_s, read_s, judged = total_s + loss_s, read_s + entry_s, judged + width
            if not self._is_due(total_s, read_s, judged):
                break
            widths[place] = width
        return Look(widths)

    def _cheapest_first(self, places: Iterable[int]) -> list[int]:
        """By what their drafters must catch up on."""
        return sorted(places, key=lambda place: self._outlook.entry_s([place]))


def _cheapest(candidate: Candidate, setting: Setting, token_s: float, entry_s: float) -> tuple[int, float]:
    """The width that loses least for each token that it judges, and what it loses."""
    now_s, num_jobs = setting.seconds(0, ()), setting.tokens
    best, least = (1, 0.0), inf
    judged = tokens = 0.0
    for width, chance in enumerate(candidate.reach, 1):
        judged += candidate.reach[width - 2] if width > 1 else 1.0
        tokens += chance
        # what a single row costs drowns in noise, so its share of a row for every request counts
        rows_s = max(
            setting.seconds(width, ()) - now_s, (setting.seconds(round(width * num_jobs), ()) - now_s) / num_jobs
        )
        kept_s = tokens * token_s if num_jobs == 1 else 0.0  # a few that end earlier do not make a batch faster
        loss_s = max(0.0, rows_s + setting.seconds(0, (1,) * width) - now_s - kept_s)
        if (loss_s + entry_s) / judged < least:
            best, least = (width, loss_s), (loss_s + entry_s) / judged
    return best
