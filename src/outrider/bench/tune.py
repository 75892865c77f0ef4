"""Finding the way to decode that is quickest for somebody's own prompts, within a time limit.

All ways take turns on one prompt after another, each beside plain decoding; after every turn through the prompts the
slower half leaves, and what is left has more time. What wins must beat plain decoding by more than the noise, or plain
decoding it is.
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
LEAST_TURNS = 2


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

    try:
        seconds_of(prompts[0], None)
        left = list(standings)
        for turn, prompt in enumerate(itertools.cycle(prompts)):
            plain = seconds_of(prompt, None)
            for standing in left:
                if progress is not None:
                    progress((time.perf_counter() - started) / limit_s, standing.way.name)
                standing.ratios.append(plain / seconds_of(prompt, standing.way))
            is_late = time.perf_counter() - started > limit_s
            if is_late or (len(left) == 1 and turn + 1 >= 2 * len(prompts)):
                break
            if (turn + 1) % LEAST_TURNS == 0 and len(left) > 1:
                left = sorted(left, key=lambda one: -one.ratio)[: max(1, (len(left) + 1) // 2)]
    except KeyboardInterrupt:
        is_complete = False
    return _judged(model, standings, len(prompts), time.perf_counter() - started, is_complete)


def _judged(model: str, standings: Sequence[Standing], num_prompts: int, seconds: float, is_complete: bool) -> Tuned:
    tried = [standing for standing in standings if standing.ratios]
    most = max((len(standing.ratios) for standing in tried), default=0)
    last = [standing for standing in tried if len(standing.ratios) == most]
    best = max(last, key=lambda one: one.ratio, default=None)
    ordered = sorted(tried, key=lambda one: -one.ratio)
    if best is None or best.ratio < MARGIN:
        return Tuned(model, None, 1.0, num_prompts, seconds, ordered, is_complete)
    return Tuned(model, best.way, best.ratio, num_prompts, seconds, ordered, is_complete)


def _mixed(work: Work) -> Iterator[str]:
    """Prompts of all kinds in turn, so that a short time sees some of each."""
    for some in itertools.zip_longest(*work.values()):
        yield from (prompt for prompt in some if prompt is not None)


def _encode(engine: Engine, prompt: str, num_tokens: int) -> list[int]:
    tokens = engine.encode(prompt)
    if isinstance(engine.tokenizer, ChatTokenizer) and getattr(engine.tokenizer, "has_chat", True):
        tokens = engine.encode_chat([{"role": "user", "content": prompt}])
    return tokens[: engine.context - num_tokens - 1]
