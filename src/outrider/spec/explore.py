"""Whether to look again, while drafting does not seem to pay, and how.

Two things may be other than they look. Acceptance or costs may be better by a standard deviation, one time in six: a
look is worth a sixth of what the rest of the answers would gain by that. And acceptance may have changed since somebody
looked, as texts do: the longer ago that is, the likelier, so looks come as often as costs least. Looking every n rounds
costs look_s / n a round, and a change is noticed n / 2 rounds late: the sum is least where both are the same.

The cheapest look is hindsight: a drafter reads what it has not read and tells what it would have drafted. Where that
says nothing (drafts that are sampled and judged by their probabilities), a few requests draft. Where acceptance is
known and the cost of so many rows is not, all draft for a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from outrider.spec.choose import Candidate, Setting, weigh
from outrider.spec.outlook import Outlook

LUCK = 0.16  # the chance that something is better than it looks by a standard deviation
ALIKE = 500.0  # rounds that acceptance stays what it is, as a rule
ENOUGH = 16  # emitted tokens that a look by hindsight judges
WORTH_A_LOOK = 8  # fewer are left to gather
MOST_PROBED = 8  # tokens that a request drafts to find out
MOST_ROWS = 16  # that a round drafts to find out what they cost, or as many as any round had
SHARE = 4  # one request of so many, then


@dataclass(slots=True)
class Look:
    """What to do in this round to find out: requests (by place) that draft so much, or whose drafters are asked what
    they would have drafted. `wait`: rounds until there is enough to look at."""

    widths: dict[int, int] = field(default_factory=dict)
    hindsight: list[int] = field(default_factory=list)
    wait: int | None = None


def look(
    outlook: Outlook,
    fed: int,
    token_s: float,
    rested: int,
    judgeable: Callable[[int], int | None],
    affordable: Callable[[float], bool],
) -> Look:
    """fed: rows of this round's pass. token_s: seconds of a token of plain decoding. rested: rounds since somebody
    looked. judgeable: how many tokens of a request (by place) hindsight would judge, None where it says nothing.
    affordable: whether so many seconds may be lost."""
    rounds = outlook.tokens_left / len(outlook.jobs)
    luck_s = LUCK * outlook.most_gain_s(outlook.candidates(doubt=-1.0))
    change_s = 0.5 * rested / ALIKE * outlook.most_gain_s(outlook.prior_candidates())
    setting = outlook.setting(fed)

    def is_due(look_s: float, read_s: float, judged: float) -> bool:
        """judged: tokens that it judges. The more are known already, the less do they say."""
        seconds, news = look_s + read_s, 1.0 if judged == inf else judged / (judged + known)
        worth = seconds <= luck_s * news or (seconds <= change_s and look_s <= change_s * rested / rounds)
        return worth and affordable(seconds)

    if luck_s + change_s <= 0.0:
        return Look()
    known = outlook.evidence()
    candidates = outlook.candidates()
    full = dict(outlook.best(candidates, outlook.setting(outlook.rows, hopeful=True)).widths)
    promises = bool(full) and outlook.gain_s(full, candidates, hopeful=True) > 0.0
    if promises:  # far beyond what was measured, costs are only guessed
        most = max(1, max(MOST_ROWS, outlook.costs.widest_seen) // len(full))
        full = {place: min(width, most) for place, width in full.items()}
    if promises and not outlook.costs.has_seen(outlook.rows + sum(full.values())):
        round_ = weigh(full, candidates, setting)
        loss_s = max(0.0, round_.seconds - round_.tokens * token_s)
        return Look(full) if is_due(loss_s, outlook.entry_s(full), inf) else Look()
    places = sorted(outlook.free, key=lambda place: outlook.entry_s([place]))
    tokens = {place: count for place in places if (count := judgeable(place)) is not None}
    if tokens:
        return _by_hindsight(outlook, tokens, is_due)
    by_place = {one.place: one for one in outlook.prior_candidates()}
    widths: dict[int, int] = {}
    total_s = read_s = judged = 0.0
    for place in places[: max(1, len(outlook.jobs) // SHARE)]:
        entry_s = outlook.entry_s([place])
        width, loss_s = _cheapest(by_place[place], setting, token_s, entry_s)
        total_s, read_s, judged = total_s + loss_s, read_s + entry_s, judged + width
        if not is_due(total_s, read_s, judged):
            break
        widths[place] = width
    return Look(widths)


def _by_hindsight(outlook: Outlook, tokens: dict[int, int], is_due: Callable[[float, float, float], bool]) -> Look:
    """tokens: how many would be judged of each request, the cheapest first."""
    chosen, judged = list[int](), 0
    for place, count in tokens.items():
        if judged < ENOUGH:
            chosen.append(place)
            judged += count
    if judged < WORTH_A_LOOK:
        return Look(wait=max(1, -(-(WORTH_A_LOOK - judged) // len(chosen))))
    look_s = max([outlook.costs.draft_s(outlook.free[place], [len(chosen)]) for place in chosen])
    return Look(hindsight=chosen) if is_due(look_s, outlook.entry_s(chosen), judged) else Look()


def _cheapest(candidate: Candidate, setting: Setting, token_s: float, entry_s: float) -> tuple[int, float]:
    """The width that loses least for each token that it judges, and what it loses."""
    now_s, num_jobs = setting.seconds(0, ()), setting.tokens
    best, least = (1, 0.0), inf
    judged = tokens = 0.0
    reach: Sequence[float] = candidate.reach[:MOST_PROBED]
    for width, chance in enumerate(reach, 1):
        judged += reach[width - 2] if width > 1 else 1.0
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
