"""Which widths give the most tokens per second. Two small functions, since a CPU and a GPU differ.

On a CPU every row costs something, so (request, position) pairs are added by their chance of being reached while
expected tokens per second grow. On a GPU rows are nearly free and shapes are dear: one width for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

WIDER = 1.01  # times as many tokens per second that a wider draft must bring: less is noise, and requests drift apart


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
    """Widths by index of the job, and the tokens and seconds of a round with them."""

    widths: Mapping[int, int]
    tokens: float
    seconds: float

    def gain(self, other: Choice, token_s: float | None) -> float:
        """How many times better than another choice it is."""
        if token_s is None:
            return self.tokens / self.seconds * other.seconds / other.tokens
        ours, theirs = (one.tokens * token_s / one.seconds for one in (self, other))
        return ours / theirs


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


def choose_pairs(candidates: Sequence[Candidate], setting: Setting, token_s: float | None = None) -> Choice:
    """Widths for each request on its own.

    token_s: what a token is worth in seconds. Without it, tokens per second are what grows. With it, tokens less the
    seconds they cost: beside a prefill everything would look cheap, so a token has the value of a steady round there.
    """
    plain_s = setting.seconds(0, ())
    pairs = sorted(
        [
            (-chance, position, candidate.place)
            for candidate in candidates
            for position, chance in enumerate(candidate.reach)
        ]
    )
    tokens, steps, whole = setting.tokens, list[float](), dict[int, float]()
    best, best_count, result = _objective(tokens, plain_s, token_s), 0, (tokens, plain_s)
    for count, (chance, position, place) in enumerate(pairs, 1):
        tokens -= chance
        whole[place] = -chance
        if position == len(steps):
            steps.append(0)
        steps[position] += 1
        # Equal chances of several requests belong together: they are looked at once the last of them is in.
        if count < len(pairs) and pairs[count][:2] == (chance, position):
            continue
        seconds = setting.seconds(count, [steps[0] + sum(whole.values()), *steps[1:]])
        value = _objective(tokens, seconds, token_s)
        if value > best:
            best, best_count, result = value, count, (tokens, seconds)
    widths: dict[int, int] = {}
    for _, position, index in pairs[:best_count]:
        widths[index] = max(widths.get(index, 0), position + 1)
    return Choice(widths, *result)


def choose_uniform(
    candidates: Sequence[Candidate], setting: Setting, widths: Sequence[int], token_s: float | None = None
) -> Choice:
    """One width of a few for all requests; each keeps to its own room within it. token_s: as for `choose_pairs`."""
    seconds = setting.seconds(0, ())
    best, chosen, result = _objective(setting.tokens, seconds, token_s), 0, (setting.tokens, seconds)
    longest = max([len(candidate.reach) for candidate in candidates], default=0)
    tokens, steps = setting.tokens, list[float]()
    most = tokens + sum([sum(candidate.reach) for candidate in candidates])
    for width in widths:
        if width > longest or _objective(most, seconds, token_s) < best:
            break  # nothing wider can be better: it takes no less, and brings no more than all
        for step in range(len(steps), width):
            reached = [candidate.reach[step] for candidate in candidates if len(candidate.reach) > step]
            tokens += sum(reached)
            steps.append(len(reached))
        whole = sum([candidate.reach[:width][-1] for candidate in candidates if candidate.reach])
        seconds = setting.seconds(int(sum(steps)), [steps[0] + whole, *steps[1:]])
        value = _objective(tokens, seconds, token_s)
        if value > best * (WIDER if chosen and token_s is None else 1.0):
            best, chosen, result = value, width, (tokens, seconds)
    return Choice({one.place: min(chosen, len(one.reach)) for one in candidates if chosen and one.reach}, *result)


def _objective(tokens: float, seconds: float, token_s: float | None) -> float:
    return tokens / seconds if token_s is None else tokens * token_s - seconds
