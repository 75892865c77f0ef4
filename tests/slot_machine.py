"""What tests of model backends share: feeding slots, comparing rows, a machine that does everything at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outrider.backends.base import Backend, Spans
from outrider.engine.engine import Engine
from outrider.metrics import Statistics
from outrider.types import Request, Scores, Slot

Feed = tuple[Slot, Sequence[int], int]  # a slot, the tokens it is fed, the rows wanted


def feed(backend: Backend, *spans: Feed, hidden: Sequence[int] = ()) -> Scores:
    """One pass."""
    return backend.score(
        Spans(
            slots=[slot for slot, _, _ in spans],
            starts=[backend.length(slot) for slot, _, _ in spans],
            counts=[len(tokens) for _, tokens, _ in spans],
            rows=[rows for _, _, rows in spans],
            tokens=backend.ops.integers([token for _, tokens, _ in spans for token in tokens]),
        ),
        hidden,
    )


def reference(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """transformers' rows after each token, everything read at once. [N, V]"""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def error(given: Any, wanted: np.ndarray) -> float:
    """Relative to the largest entry."""
    assert given.shape == wanted.shape, f"{given.shape} is not {wanted.shape}"
    return float(np.abs(np.asarray(given) - wanted).max() / np.abs(wanted).max())


def machine(make: Callable[[], Backend], model: Any, *, max_rewind: int | None, runs: int = 8, steps: int = 40) -> Any:
    """A test that opens, feeds, rewinds, forks, closes, saves and loads at random. Every row is compared."""
    vocab_size, longest, most = model.config.vocab_size, 30, 6

    class Slots(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            self.backend = make()
            self.tokens: dict[Slot, list[int]] = {}
            self.oldest: dict[Slot, int] = {}

        @rule()
        def open(self) -> None:
            if len(self.tokens) < most:
                self.add(self.backend.open(), [], 0)

        @precondition(lambda self: self.tokens)
        @rule(data=st.data())
        def score(self, data: Any) -> None:
            slots = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, max_size=4, unique=True))
            spans = []
            for slot in slots:
                room = longest - len(self.tokens[slot])
                if room > 0:
                    ids = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=min(room, 12))
                    fed = data.draw(ids)
                    spans.append((slot, fed, data.draw(st.integers(0, len(fed)))))
            if spans:
                self.compare(spans)

        @precondition(lambda self: self.tokens)
        @rule(data=st.data(), through_keep=st.booleans())
        def rewind(self, data: Any, through_keep: bool) -> None:
            slot = data.draw(st.sampled_from(sorted(self.tokens)))
            length = data.draw(st.integers(self.oldest[slot], len(self.tokens[slot])))
            if through_keep:
                self.backend.keep([slot], [length])
            else:
                self.backend.rewind(slot, length)
            del self.tokens[slot][length:]

        @precondition(lambda self: 0 < len(self.tokens) < most)
        @rule(data=st.data())
        def fork(self, data: Any) -> None:
            slot = data.draw(st.sampled_from(sorted(self.tokens)))
            self.add(self.backend.fork(slot), list(self.tokens[slot]), self.oldest[slot])

        @precondition(lambda self: self.tokens)
        @rule(data=st.data())
        def close(self, data: Any) -> None:
            slot = data.draw(st.sampled_from(sorted(self.tokens)))
            self.drop(slot)

        @precondition(lambda self: self.tokens)
        @rule(data=st.data())
        def save_and_load(self, data: Any) -> None:
            slot = data.draw(st.sampled_from(sorted(self.tokens)))
            state, tokens, oldest = self.backend.save(slot), self.tokens[slot], self.oldest[slot]
            self.drop(slot)
            self.add(self.backend.load(state), tokens, oldest)

        def drop(self, slot: Slot) -> None:
            self.backend.close(slot)
            del self.tokens[slot], self.oldest[slot]

        def add(self, slot: Slot | None, tokens: list[int], oldest: int) -> None:
            assert slot is not None and slot not in self.tokens
            self.tokens[slot], self.oldest[slot] = tokens, oldest

        def compare(self, spans: Sequence[Feed]) -> None:
            scores = feed(self.backend, *spans)
            wanted = []
            for slot, fed, rows in spans:
                self.tokens[slot] += fed
                held = len(self.tokens[slot])
                if max_rewind is not None:
                    self.oldest[slot] = max(self.oldest[slot], held - max_rewind)
                if rows:
                    wanted.append(reference(model, self.tokens[slot])[-rows:])
                assert self.backend.length(slot) == held
            assert scores.counts == [rows for _, _, rows in spans if rows]
            if wanted:
                assert error(scores.logits, np.concatenate(wanted)) < 1e-4

    test = Slots.TestCase
    test.settings = settings(max_examples=runs, stateful_step_count=steps, deadline=None)
    return test


PROMPTS = ([5, 9, 5, 9, 5], [17], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [60, 61, 62] * 7)
RULES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "coupled": {"temperature": 0.9, "seed": 11}}


class Answers(NamedTuple):
    """The tokens said to each prompt, and what speculation did."""

    tokens: list[list[int]]
    statistics: Statistics


def answers(backend: Any, rule: str, *, draft: Any = None, width: int | None = None, **settings: Any) -> Answers:
    """All prompts answered at once; nothing is left behind."""
    engine = Engine.load(backend, draft=draft, width=width, **settings)
    requests = [Request.of(list(prompt), {"max_tokens": 12, "ignore_eos": True, **RULES[rule]}) for prompt in PROMPTS]
    tokens = [result.token_ids for result in engine.generate(requests)]
    assert backend.num_slots == 0
    return Answers(tokens, engine.statistics)
