"""Which widths give the most tokens per second.

One width for all requests comes from a short list. On a GPU that is all: rows are nearly free there, shapes are dear.
On a CPU every row costs something, so each request may draft just the positions that are worth their row. That must be
clearly better, since widths that differ by noise leave stragglers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # that a device has one shape for
WIDER = 1.01  # times as many tokens per second that a wider draft must bring: less is noise
OWN_WIDTHS = 1.05  # times better that widths of their own must be than equal ones


class Candidate(NamedTuple):
    """A request whose width is free: its chances to keep a chain up to each position."""

    place: int  # of the job among the batch's decode jobs
    reach: Sequence[float]


class Setting(NamedTuple):
    """The pass that drafts are added to. `seconds(drafted, rows_by_step)` is a whole round with so many drafts. A draft
    step has a row for each request, and the first step one more for each whose last chain was kept whole: the drafter
    has not read that chain's last token."""

    tokens: float  # that it emits without the candidates' drafts
    seconds: Callable[[int, Sequence[float]], float]


class Choice(NamedTuple):
    """Widths by place of the job, and the tokens and seconds of a round with them."""

    widths: Mapping[int, int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def value(self, token_s: float | None) -> float:
        """What is to be largest: tokens per second, or where a token is worth so many seconds, what is gained."""
        return self.rate if token_s is None else self.tokens * token_s - self.seconds


def weigh(widths: Mapping[int, int], candidates: Sequence[Candidate], setting: Setting) -> Choice:
    """A round with these widths."""
    tokens, steps, whole = setting.tokens, list[float](), 0.0
    for one in candidates:
        chances = one.reach[: widths.get(one.place, 0)]
        tokens += sum(chances)
        steps += [0] * (len(chances) - len(steps))
        for step in range(len(chances)):
            steps[step] += 1
        whole += chances[-1] if chances else 0.0
    drafted = int(sum(steps))
    return Choice(widths, tokens, setting.seconds(drafted, [steps[0] + whole, *steps[1:]] if steps else ()))


def choose(
    candidates: Sequence[Candidate], setting: Setting, token_s: float | None = None, *, uniform: bool = False
) -> Choice:
    """The best widths; none where plain decoding is better.

    token_s: what a token is worth in seconds. Without it, tokens per second are what counts. With it, tokens less the
    seconds they cost: beside a prefill everything would look cheap, so a token has the value of a steady round there.
    """
    plain = weigh({}, candidates, setting)
    equal = _equal(candidates, setting, token_s, plain)
    best = equal if equal.value(token_s) > plain.value(token_s) else plain
    if uniform or len(candidates) == 1 or not equal.widths:
        return best
    row_s = (equal.seconds - plain.seconds) / sum(equal.widths.values())
    least = row_s * best.rate if token_s is None else row_s / token_s  # a chance that is worth its row
    widths = {one.place: sum([chance >= least for chance in one.reach]) for one in candidates}
    own = weigh({place: width for place, width in widths.items() if width}, candidates, setting)
    return own if own.value(token_s) > best.value(token_s) and own.rate > OWN_WIDTHS * best.rate else best


def _equal(candidates: Sequence[Candidate], setting: Setting, token_s: float | None, plain: Choice) -> Choice:
    """The best width above 0 for all requests; each keeps to its own room within it."""
    longest = max([len(one.reach) for one in candidates], default=0)
    tokens, steps = setting.tokens, list[float]()
    most = tokens + sum([sum(one.reach) for one in candidates])
    best, best_value, best_width = plain, plain.value(token_s), 0
    for width in WIDTHS:
        if width > longest or (best_width and Choice({}, most, best.seconds).value(token_s) < best_value):
            break  # nothing wider can be better: it takes no less, and brings no more than all
        for step in range(len(steps), width):
            reached = [one.reach[step] for one in candidates if len(one.reach) > step]
            tokens += sum(reached)
            steps.append(len(reached))
        whole = sum([one.reach[:width][-1] for one in candidates if one.reach])
        seconds = setting.seconds(int(sum(steps)), [steps[0] + whole, *steps[1:]])
        choice = Choice({}, tokens, seconds)
        if not best_width or choice.value(token_s) > best_value * (WIDER if token_s is None else 1.0):
            best, best_value, best_width = choice, choice.value(token_s), width
    widths = {one.place: min(best_width, len(one.reach)) for one in candidates if one.reach} if best_width else {}
    return best._replace(widths=widths)
