"""Greedy identity with plain decoding on the default model, for every method and shape (`make identity`).

Prompts are the benchmark's own, or those of $OUTRIDER_PROMPTS (JSON lines with `category` and `turns`), two of each
kind or as many as $OUTRIDER_PER_KIND says. Heads have random weights: what they guess is rubbish, what comes out must
not be. The native backend must not differ in a single token. torch's pass of several rows rounds differently from one
of a single row, so a near-tie may flip: each is printed with its gap.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers

from outrider.backends.base import Spans
from outrider.bench.contest import encode
from outrider.bench.work import OWN, Work, read_work
from outrider.engine.engine import Engine
from outrider.models.source import ModelSource
from outrider.native.library import why_not
from outrider.types import Request, SamplingParams

from tiny_heads import save_head

pytestmark = pytest.mark.slow
METHODS = ("ngram", "suffix", "layerskip", "medusa", "eagle", "eagle3", "model", "suffix,layerskip")
SHAPES = {
    "width-1": (1, False),
    "width-3": (3, False),
    "width-7": (7, False),
    "tree-16": (16, True),
    "auto": (None, None),
}
GREEDY = SamplingParams(temperature=0.0)
PER_KIND = int(os.environ.get("OUTRIDER_PER_KIND", "2"))
MOST_TIES = 1 if why_not() else 0
CACHE = 120_000  # tokens: prompts are read once for all shapes


@pytest.fixture(scope="module")
def work() -> Work:
    path = os.environ.get("OUTRIDER_PROMPTS")
    return read_work(Path(path)) if path else OWN


@pytest.fixture(scope="module")
def path() -> Path:
    return ModelSource.parse("smollm2").fetch()


@pytest.fixture(scope="module")
def heads(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("heads")
    target = SimpleNamespace(config=transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
    for layout in ("medusa", "eagle", "eagle3"):
        save_head(folder / layout, layout, target)
    return {
        "medusa": f"medusa:{folder / 'medusa'}",
        "eagle": f"eagle:{folder / 'eagle'}",
        "eagle3": f"eagle:{folder / 'eagle3'}",
        "model": str(path),
    }


@pytest.fixture(scope="module")
def plain(path: Path) -> Engine:
    return Engine.load(path, draft="none", context=2048, cache_tokens=CACHE)


def answers(engine: Engine, prompts: list[list[int]], length: int, **shape: object) -> list[list[int]]:
    requests = [
        Request(prompt=prompt, sampling=GREEDY, max_tokens=length, ignore_eos=True, **shape) for prompt in prompts
    ]
    return [result.token_ids for result in engine.generate(requests)]


def differences(engine: Engine, prompts: list[list[int]], ours: list[list[int]], wanted: list[list[int]]) -> list[str]:
    """Near-ties; anything else fails."""
    ties = []
    for prompt, mine, theirs in zip(prompts, ours, wanted, strict=True):
        place = next((at for at, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            before = prompt + theirs[:place]
            slot = engine.loop.target.open((), len(before))
            row = engine.loop.target.score(Spans([slot], [0], [len(before)], [1], np.array(before))).logits[0]
            engine.loop.target.close(slot)
            gap = abs(float(row[theirs[place]] - row[mine[place]]))
            ties.append(f"at {place} of {len(mine)}: {theirs[place]} or {mine[place]}, a gap of {gap:.2g}")
            assert gap < 1e-4 * float(np.abs(row).max()), ties[-1]
    return ties


def drafts_of(method: str, heads: dict[str, str]) -> str:
    return ",".join(heads.get(part, part) for part in method.split(","))


@pytest.mark.parametrize("method", METHODS)
def test_every_shape_says_the_same(
    method: str, path: Path, heads: dict[str, str], work: Work, plain: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [encode(plain, prompt)[:700] for some in work.values() for prompt in some[:PER_KIND]]
    wanted = answers(plain, prompts, 32)
    engine = Engine.load(path, draft=drafts_of(method, heads), context=2048, cache_tokens=CACHE)
    for name, (width, tree) in SHAPES.items():
        engine.reset_statistics()
        ours = answers(engine, prompts, 32, width=width, tree=tree)
        ties = differences(plain, prompts, ours, wanted)
        counts = engine.statistics
        with capsys.disabled():
            print(  # noqa: T201
                f"\n{method}, {name}: {len(prompts)} answers equal but for {len(ties)} near-ties {ties or ''}; "
                f"{counts.drafted} drafted, {counts.accepted} kept, {counts.tokens_per_round:.2f} tokens a round",
                end="",
            )
        assert len(ties) <= MOST_TIES
        assert counts.drafted > 0 or width is None


@pytest.mark.parametrize("method", METHODS)
def test_longer_answers_say_the_same(
    method: str, path: Path, heads: dict[str, str], work: Work, plain: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [encode(plain, some[-1])[:700] for some in work.values()]
    prompts = (prompts + [encode(plain, some[0])[:700] for some in work.values()])[:8]
    wanted = answers(plain, prompts, 64)
    engine = Engine.load(path, draft=drafts_of(method, heads), context=2048, cache_tokens=CACHE)
    ties = differences(plain, prompts, answers(engine, prompts, 64, width=5, tree=False), wanted)
    with capsys.disabled():
        print(f"\n{method}, 8 answers of 64 tokens at width 5: near-ties {ties or 'none'}", end="")  # noqa: T201
    assert len(ties) <= MOST_TIES
