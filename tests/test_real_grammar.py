"""The default model held to a JSON schema: valid every time, under speculation, at temperature 1 (`make real`)."""

from __future__ import annotations

import pytest

from outrider import Constraint, Engine
from outrider.types import Request, SamplingParams

from test_grammar import SCHEMA, check_schema

pytestmark = pytest.mark.slow
QUESTIONS = ["Describe a person you met on the road.", "Who lives next door?", "Invent a hero.", "Name a scientist."]


@pytest.mark.parametrize("width", [None, 4])
def test_two_hundred_answers_of_a_schema(width: int | None) -> None:
    engine = Engine.load("smollm2", draft="suffix,layerskip:8", max_batch=16)
    prompts = [
        engine.encode_chat([{"role": "user", "content": f"{question} Answer in JSON."}]) for question in QUESTIONS
    ]
    requests = [
        Request(
            prompt=prompts[number % len(prompts)],
            sampling=SamplingParams(temperature=1.0),
            max_tokens=200,
            width=width,
            constraint=Constraint.json_schema(SCHEMA),
        )
        for number in range(200)
    ]
    results = engine.generate(requests)
    for result in results:
        assert result.finish_reason == "stop", result.text
        check_schema(result.text)
    assert engine.statistics.drafted > 100
    assert len({result.text for result in results}) > 150


def test_the_same_answer_as_plain_decoding() -> None:
    engine = Engine.load("smollm2", draft="suffix,layerskip:8", strict=True)
    prompt = engine.encode_chat([{"role": "user", "content": "Describe a person. Answer in JSON."}])
    constraint = Constraint.json_schema(SCHEMA)
    for settings in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
        answers = [
            engine.generate(prompt, constraint=constraint, max_tokens=120, width=width, tree=tree, **settings).token_ids
            for width, tree in ((0, False), (4, False), (12, True))
        ]
        assert answers[0] == answers[1] == answers[2]
