"""Finding the way to decode that is quickest for somebody's own prompts, within a time limit.

A contest: all ways take turns on one prompt after another, each beside plain decoding, and after every few prompts the
slower half leaves. Whoever is left is then measured anew on all prompts: the best of many noisy numbers looks better
than it is. It is chosen if three prompts of four are quicker by it, and the median by a little more than noise; else
plain decoding is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from outrider.bench.work import OWN, Work
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.tokenizer.base import ChatTokenizer

WIDTHS: tuple[int | None, ...] = (None, 1, 2, 3, 4, 6, 8, 12)  # None: the engine chooses
TREES = (8, 16)
MARGIN = 1.02  # over plain decoding, for a way to be worth a setting
BETWEEN = 4  # prompts after which the slower half leaves
CONTEST = 0.6  # share of the time for finding the best; the rest is for measuring it


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode."""

    draft: str  # as `--draft` names it
    method: str  # as requests name it
    width: int | None
    tree: bool = False

    @property
    def name(self) -> str:
        shape = "auto" if self.width is None else f"tree of {self.width}" if self.tree else f"width {self.width}"
        return f"{self.draft}, {shape}"


@dataclass(slots=True)
class Standing:
    """How a way did so far: plain seconds over its own, prompt by prompt."""

    way: Way
    ratios: list[float] = field(default_factory=list)
    is_final: bool = False  # measured anew after the contest

    @property
    def ratio(self) -> float:
        return median(self.ratios) if self.ratios else 0.0

    @property
    def low(self) -> float:
        """A quarter of the prompts did worse."""
        ordered = sorted(self.ratios)
        return ordered[len(ordered) // 4] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Tuned:
    """What to use, and how sure that is. `way` is None where plain decoding is best."""

    model: str
    way: Way | None
    ratio: float
    num_prompts: int
    seconds: float
    standings: Sequence[Standing]
    is_complete: bool  # False: it was interrupted


def ways(engine: Engine, drafts: Sequence[str]) -> list[Way]:
    """Everything that is tried."""
    found = []
    for draft, method in zip(drafts, engine.methods[1:], strict=True):
        found += [Way(draft, method, width) for width in WIDTHS]
        if engine.info.trees:
            found += [Way(draft, method, size, True) for size in TREES]
    return found


def tune(
    model: str,
    *,
    drafts: Sequence[str] = ("ngram", "suffix"),
    work: Work | None = None,
    limit_s: float = 300.0,
    num_tokens: int = 64,
    threads: int | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> Tuned:
    """Try until the time is over or one way is left. Ctrl-C ends it early, with what is known."""
    if not drafts:
        raise ConfigError("name at least one draft to try", param="draft")
    engine = Engine.load(model, draft=",".join(drafts), threads=threads)
    prompts = [_encode(engine, prompt, num_tokens) for prompt in _mixed(work or OWN)]
    standings = [Standing(way) for way in ways(engine, drafts)]
    tenants = (f"run-{number}" for number in itertools.count())
    started, is_complete = time.perf_counter(), True

    def seconds_of(prompt: list[int], way: Way | None) -> float:
        begun = time.perf_counter()
        engine.generate(
            prompt,
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            method="none" if way is None else way.method,
            width=0 if way is None else way.width,
            tree=None if way is None or way.width is None else way.tree,
            tenant=next(tenants),  # nobody finds another's pages or past text
        )
        return time.perf_counter() - begun

    def time_used() -> float:
        return (time.perf_counter() - started) / limit_s

    def compare(prompt: list[int], some: Sequence[Standing], until: float) -> None:
        plain = seconds_of(prompt, None)
        for standing in some:
            if progress is not None:
                progress(time_used(), standing.way.name)
            standing.ratios.append(plain / seconds_of(prompt, standing.way))
            if time_used() > until:
                return

    final: Standing | None = None
    try:
        seconds_of(prompts[0], None)
        left = list(standings)
        for turn, prompt in enumerate(itertools.cycle(prompts), 1):
            compare(prompt, left, CONTEST)
            if turn % BETWEEN == 0:
                left = sorted(left, key=lambda one: -one.ratio)[: (len(left) + 1) // 2]
            if len(left) == 1 or time_used() > CONTEST:
                break
        final = Standing(max(left, key=lambda one: one.ratio).way, is_final=True)
        for prompt in prompts:
            compare(prompt, [final], 1.0)
            if time_used() > 1.0:
                break
    except KeyboardInterrupt:
        is_complete = False
    return _judged(model, final, standings, len(prompts), time.perf_counter() - started, is_complete)


def _judged(
    model: str,
    final: Standing | None,
    standings: Sequence[Standing],
    num_prompts: int,
    seconds: float,
    is_complete: bool,
) -> Tuned:
    tried = sorted((one for one in standings if one.ratios), key=lambda one: (-len(one.ratios), -one.ratio))
    ordered = [*([final] if final is not None and final.ratios else []), *tried]
    is_better = final is not None and bool(final.ratios) and final.ratio >= MARGIN and final.low > 1.0
    if final is None or not is_better:
        return Tuned(model, None, 1.0, num_prompts, seconds, ordered, is_complete)
    return Tuned(model, final.way, final.ratio, num_prompts, seconds, ordered, is_complete)


def _mixed(work: Work) -> Iterator[str]:
    """Prompts of all kinds in turn, so that a short time sees some of each."""
    for some in itertools.zip_longest(*work.values()):
        yield from (prompt for prompt in some if prompt is not None)


def _encode(engine: Engine, prompt: str, num_tokens: int) -> list[int]:
    tokens = engine.encode(prompt)
    if isinstance(engine.tokenizer, ChatTokenizer) and getattr(engine.tokenizer, "has_chat", True):
        tokens = engine.encode_chat([{"role": "user", "content": prompt}])
    return tokens[: engine.context - num_tokens - 1]
