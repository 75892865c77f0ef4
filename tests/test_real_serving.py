"""A few dozen requests at once on the default model with a cache that is too small for them (`make serving`)."""

from __future__ import annotations

import random

import pytest

from outrider.bench.work import OWN
from outrider.config import SchedulerConfig
from outrider.engine.engine import Engine
from outrider.types import Request, SamplingParams

pytestmark = pytest.mark.slow
COUNT = 30


def requests(engine: Engine) -> list[Request]:
    """Prompts with common beginnings, of all lengths; greedy and seeded, some of them wide, some plain."""
    choose = random.Random(1)
    prompts = [engine.encode(text) for some in OWN.values() for text in some]
    return [
        Request(
            prompt=choose.choice(prompts)[: choose.randrange(8, 90)],
            sampling=SamplingParams(temperature=choose.choice([0.0, 0.9]), seed=number),
            max_tokens=choose.choice([4, 8, 16, 100]),
            ignore_eos=True,
            width=choose.choice([None, None, 0, 3]),
            tree=choose.choice([None, False]),
            priority=choose.choice(["low", "normal", "high"]),
        )
        for number in range(COUNT)
    ]


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Every request by itself, decoded plainly."""
    engine = Engine.load("smollm2", draft="none", strict=True, context=256)
    plain = [Request(**{**_fields(request), "width": 0, "tree": None}) for request in requests(engine)]
    return {number: engine.generate(request).token_ids for number, request in enumerate(plain)}


def _fields(request: Request) -> dict[str, object]:
    return {name: getattr(request, name) for name in Request.__dataclass_fields__}


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority", "orca"])
def test_everybody_gets_what_it_would_have_got_alone(
    policy: str, preempt: str, alone: dict[int, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduling = SchedulerConfig(policy=policy, preempt=preempt, max_batch=12, prefill_chunk=64)
    engine = Engine.load("smollm2", draft="suffix", strict=True, context=256, cache_tokens=512, scheduling=scheduling)
    answers = engine.generate(requests(engine))
    for number, answer in enumerate(answers):
        assert answer.token_ids == alone[number], f"request {number}"
    pages = engine.loop.target.pages
    pages.check()
    assert pages.usage.held == 0
    preemptions = engine.statistics.preemptions
    with capsys.disabled():
        print(f"\n{policy}, {preempt}: {COUNT} answers equal, {preemptions} preemptions", end="")  # noqa: T201
    assert (preemptions == 0) == (policy == "orca")
