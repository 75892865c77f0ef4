"""Token identity: greedy, and `coupled` at any settings, say what plain decoding says, whatever else goes on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.backends.mock import MockBackend, mock_tokenizer
from outrider.clock import Clock, VirtualClock
from outrider.config import MockConfig
from outrider.draft.base import Drafter
from outrider.draft.lookup import ScriptedDrafter
from outrider.engine.engine import Engine
from outrider.errors import RequestError
from outrider.types import FinishReason, Request, Result, SamplingParams

from cases import MixedDrafter, TreeDrafter


def noise_script(vocab: int, salt: int) -> ScriptedDrafter:
    """Guesses that look random but depend on the context alone, of varying length."""

    def script(tokens: Sequence[int], width: int) -> list[int]:
        dice = random.Random(f"{salt}:{list(tokens)}")
        return [dice.randrange(vocab) for _ in range(dice.randint(0, width))]

    return ScriptedDrafter(script)


DRAFTS = ("model", "twin", "forward-only", "forgetful", "crowded", "scripted", "trees", "mixed", "ngram", "suffix")
CHAINS = ("ngram,model", "suffix,trees", "suffix,ngram,mixed,twin", "ngram,suffix,forward-only")


def draft_of(kind: str, config: MockConfig, clock: Clock | None = None) -> str | MockBackend | Drafter | list[Any]:
    if "," in kind:
        return [draft_of(one, config, clock) for one in kind.split(",")]
    if kind == "scripted":
        return noise_script(config.vocab_size, config.seed)
    if kind in ("trees", "mixed"):
        return {"trees": TreeDrafter, "mixed": MixedDrafter}[kind](config.vocab_size)
    if kind in ("ngram", "suffix"):
        return kind
    changes: dict[str, Any] = {
        "model": {},
        "twin": {"drift": 0.0},
        "forward-only": {"max_rewind": 0},
        "forgetful": {"context": 12},
        "crowded": {"max_slots": 1},
    }[kind]
    changes = {"drift": 0.8, "max_rewind": None, "seconds_per_pass": config.seconds_per_pass / 50, **changes}
    return MockBackend(replace(config, **changes), clock=clock)


mocks = st.builds(
    MockConfig,
    vocab_size=st.integers(2, 24),
    padding=st.integers(0, 2),
    context=st.sampled_from([24, 200]),
    seed=st.integers(0, 10_000),
    sharpness=st.floats(0.1, 4.0),
    order=st.sampled_from([None, 1, 2]),
    max_rewind=st.sampled_from([None, None, 0, 2]),
    seconds_per_pass=st.just(1.0),  # of a clock of the test's own: where the engine chooses, drafting pays
)
controls = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 1.0, 1.5])},
    optional={
        "top_k": st.integers(1, 6),
        "top_p": st.floats(0.05, 0.99),
        "min_p": st.floats(0.0, 0.9),
        "typical_p": st.floats(0.05, 0.99),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-1.0, 1.0),
        "frequency_penalty": st.floats(-1.0, 1.0),
        "logit_bias": st.just({0: 1.5, 1: -1.0}),
        "banned": st.just((0,)),
    },
)


def same(speculative: Result, plain: Result) -> None:
    assert speculative.token_ids == plain.token_ids
    assert speculative.text == plain.text
    assert speculative.finish_reason == plain.finish_reason


def consistent(result: Result) -> None:
    counts = result.statistics
    assert counts.tokens == len(result.token_ids)
    assert counts.drafted == counts.accepted + counts.rejected + counts.unread
    assert counts.accepted + counts.bonus <= counts.tokens


trees = st.sampled_from([True, None, False])


@settings(max_examples=400)
@given(
    config=mocks,
    draft=st.sampled_from(DRAFTS + CHAINS),
    width=st.one_of(st.integers(1, 7), st.sampled_from([None, 16])),
    tree=trees,
    shape=controls,
    seed=st.integers(0, 2**32),
    length=st.integers(1, 16),
    chunk=st.integers(1, 8),
    data=st.data(),
)
def test_coupled_and_greedy_equal_plain(
    config: MockConfig,
    draft: str,
    width: int | None,
    tree: bool | None,
    shape: dict[str, Any],
    seed: int,
    length: int,
    chunk: int,
    data: st.DataObject,
) -> None:
    prompt = data.draw(st.lists(st.integers(0, config.vocab_size - 1), min_size=1, max_size=7))
    clock = VirtualClock()
    target = MockBackend(config, clock=clock)
    tokenizer = mock_tokenizer(config.vocab_size)
    engine = Engine.load(
        target,
        draft=draft_of(draft, config, clock),
        clock=clock,
        width=width,
        tree=tree,
        tokenizer=tokenizer,
        prefill_chunk=chunk,
        max_batch=3,
    )
    settings = {"max_tokens": length, "accept": "coupled", "seed": seed, **shape}
    plain = engine.generate(prompt, width=0, **settings)
    consistent(plain)
    assert plain.statistics.drafted == 0
    assert plain.statistics.rounds == len(plain.token_ids)  # one pass a token, and those that read the prompt
    assert plain.statistics.passes == len(plain.token_ids) + (len(prompt) - 1) // chunk
    speculative = engine.generate(prompt, **settings)
    same(speculative, plain)
    consistent(speculative)
    assert 1 <= speculative.statistics.tokens_per_round <= (16 if width is None else width) + 1
    if shape["temperature"] == 0.0:
        same(engine.generate(prompt, **{**settings, "accept": "rejection"}), plain)
    assert target.num_slots == 0


@settings(max_examples=100)
@given(
    config=mocks,
    # The others propose what the past, their own dice or the neighbours say: they repeat only under `coupled`.
    draft=st.sampled_from([*(kind for kind in DRAFTS if kind not in ("suffix", "mixed", "crowded")), "ngram,model"]),
    width=st.integers(1, 9),
    tree=trees,
    seed=st.integers(0, 2**32),
    shapes=st.lists(controls, min_size=2, max_size=4),
    rule=st.sampled_from(["coupled", "rejection"]),
    leaves_after=st.integers(0, 3),
)
def test_alone_in_a_batch_and_after_a_neighbour_left(
    config: MockConfig,
    draft: str,
    width: int,
    tree: bool | None,
    seed: int,
    shapes: list[dict[str, Any]],
    rule: str,
    leaves_after: int,
) -> None:
    """Also under `rejection`: seed, rule, width and drafter repeat the tokens, whoever shares the pass."""
    clock = VirtualClock()
    backend, drafter = MockBackend(config, clock=clock), draft_of(draft, config, clock)
    engine = Engine.load(backend, draft=drafter, width=width, tree=tree, clock=clock, threaded=False)
    requests = [
        Request(prompt=[1, 0], sampling=SamplingParams(seed=seed, accept=rule, **shape), max_tokens=8, choice=choice)
        for choice, shape in enumerate(shapes)
    ]
    alone = [engine.generate(request) for request in requests]
    together = engine.generate(requests)
    for one, other in zip(alone, together, strict=True):
        same(other, one)
    streams = [engine.stream(request) for request in requests]
    for _ in range(leaves_after):
        engine.step()
    streams[0].close()
    for stream, one in zip(streams[1:], alone[1:], strict=True):
        same(list(stream)[-1].result, one)


def test_whoever_chooses_the_width_knows_what_the_target_reads() -> None:
    """A tree was asked for, and the width left to the engine: a target of chains gets chains."""
    clock = VirtualClock()
    config = MockConfig(vocab_size=8, seed=1, max_rewind=4, seconds_per_pass=1.0)
    engine = Engine.load(MockBackend(config, clock=clock), draft=draft_of("twin", config, clock), clock=clock)
    settings = {"max_tokens": 60, "seed": 3}
    same(engine.generate([1, 2], tree=True, **settings), engine.generate([1, 2], width=0, **settings))
    assert engine.loop.statistics.drafted > 0


@pytest.mark.parametrize("draft", ["model", "trees"])
def test_a_processor_that_fails_on_a_branch_that_never_was(draft: str) -> None:
    """It fails the request where the answer itself comes to such a text, with trees as without."""

    def picky(tokens: Sequence[int], row: Any) -> Any:
        assert tokens[-2:] != [2, 1], "not this"
        return row

    config = MockConfig(vocab_size=4, seed=2)
    engine = Engine.load(MockBackend(config), draft=draft_of(draft, config))

    def outcome(seed: int, **shape: Any) -> str | list[int]:
        try:
            return engine.generate([1], seed=seed, processors=[picky], max_tokens=8, **shape).token_ids
        except RequestError as error:
            return error.message

    plain = [outcome(seed, width=0) for seed in range(40)]
    assert {type(one) for one in plain} == {str, list}
    assert [outcome(seed, width=8, tree=True) for seed in range(40)] == plain


EVERYBODY = "ngram,suffix,trees,mixed,model"


@settings(max_examples=100)
@given(
    config=mocks,
    seed=st.integers(0, 2**32),
    chunk=st.integers(1, 8),
    asked=st.lists(
        st.tuples(
            st.sampled_from([*EVERYBODY.split(","), EVERYBODY, "model,ngram", "suffix,mixed", "none", None]),
            st.sampled_from([None, 0, 1, 3, 8, 16]),
            trees,
            controls,
            st.sampled_from(["coupled", "coupled", "rejection"]),
            st.lists(st.integers(0, 1), min_size=1, max_size=6),
        ),
        min_size=2,
        max_size=7,
    ),
)
def test_a_batch_of_all_methods_equals_plain(
    config: MockConfig, seed: int, chunk: int, asked: list[tuple[Any, ...]]
) -> None:
    """Whoever drafts, in whatever shape, beside whomever; jobs under `rejection` are only neighbours."""
    clock = VirtualClock()
    backend, drafts = MockBackend(config, clock=clock), draft_of(EVERYBODY, config, clock)
    engine = Engine.load(backend, draft=drafts, prefill_chunk=chunk, max_batch=5, clock=clock)
    requests = [
        Request(
            prompt=prompt,
            sampling=SamplingParams(seed=seed, accept=rule, **shape),
            max_tokens=10,
            choice=choice,
            method=method,
            width=width,
            tree=tree,
        )
        for choice, (method, width, tree, shape, rule, prompt) in enumerate(asked)
    ]
    together = engine.generate(requests)
    plain = engine.generate([replace(request, width=0, method="none", tree=None) for request in requests])
    for request, result, expected in zip(requests, together, plain, strict=True):
        consistent(result)
        if request.sampling.rule == "coupled" or request.sampling.temperature == 0.0:
            same(result, expected)
    assert engine.loop.target.num_slots == 0


# ---- every stop condition at every position of an accepted block -------------------------------------------------

WIDTH = 5
PROMPT = [1, 2]
VOCAB = 26
LONG = 13  # a first round of 6 tokens, a second of 6, and one more


def twin_engine(draft: str = "twin", **changes: Any) -> Engine:
    """Every draft of the twin is accepted: all stops fall inside a block. Its trees are deep enough for that, too."""
    config = replace(MockConfig(vocab_size=VOCAB, seed=3), **changes)
    kind, _, shape = draft.partition("-")
    width, tree = (16, True) if shape == "tree" else (WIDTH, False)
    return Engine.load(
        MockBackend(config), draft=draft_of(kind, config), width=width, tree=tree, tokenizer=mock_tokenizer(VOCAB)
    )


def truth(temperature: float) -> list[int]:
    return twin_engine().generate(PROMPT, max_tokens=LONG, width=0, seed=9, temperature=temperature).token_ids


def text_of(tokens: Sequence[int]) -> str:
    tokenizer = mock_tokenizer(VOCAB)
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("draft", ["twin", "model", "twin-tree", "model-tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("position", range(LONG))
class TestStops:
    def run(self, engine: Engine, temperature: float, **settings: Any) -> Result:
        result = engine.generate(PROMPT, seed=9, temperature=temperature, **{"max_tokens": LONG, **settings})
        consistent(result)
        assert engine.num_requests == 0
        assert engine.loop.target.num_slots == 0
        return result

    def test_max_tokens(self, draft: str, temperature: float, position: int) -> None:
        result = self.run(twin_engine(draft), temperature, max_tokens=position + 1)
        assert result.token_ids == truth(temperature)[: position + 1]
        assert result.finish_reason is FinishReason.LENGTH

    def test_context_end(self, draft: str, temperature: float, position: int) -> None:
        engine = twin_engine(draft, context=len(PROMPT) + position + 1)
        result = self.run(engine, temperature, max_tokens=None)
        assert result.token_ids == truth(temperature)[: position + 1]
        assert result.finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize("kind", ["stop_ids", "eos"])
    def test_stop_id(self, draft: str, temperature: float, position: int, kind: str) -> None:
        tokens = truth(temperature)
        token = tokens[position]
        first = tokens.index(token)
        if kind == "eos":
            engine, settings = twin_engine(draft, eos_ids=(token, (token + 1) % VOCAB)), {}
            first = min(first, *(tokens.index(t) for t in [(token + 1) % VOCAB] if t in tokens), LONG)
        else:
            engine, settings = twin_engine(draft), {"stop_ids": [token]}
        result = self.run(engine, temperature, **settings)
        assert result.token_ids == tokens[: first + 1]  # the id is there
        assert result.text == text_of(tokens[:first])  # its text is not
        assert result.finish_reason is FinishReason.STOP

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_stop_string(self, draft: str, temperature: float, position: int, size: int) -> None:
        """The string ends inside or at the end of a token, and may begin tokens earlier."""
        tokens = truth(temperature)
        text = text_of(tokens[: position + 1])
        stop = text[-size:]
        if "\ufffd" in stop or not stop:
            return  # half a character is not text yet: nothing to stop at
        cut = text_of(tokens).index(stop)
        needed = next(n for n in range(1, LONG + 1) if stop in text_of(tokens[:n]))
        result = self.run(twin_engine(draft), temperature, stop=[stop, "never"])
        assert result.token_ids == tokens[:needed]
        assert result.text == text_of(tokens)[:cut]
        assert result.finish_reason is FinishReason.STOP

    def test_callback(self, draft: str, temperature: float, position: int) -> None:
        seen: list[int] = []

        def on_token(token: int, text: str) -> bool:
            seen.append(token)
            return len(seen) <= position

        result = self.run(twin_engine(draft), temperature, on_token=on_token)
        assert result.token_ids == seen == truth(temperature)[: position + 1]
        expected = FinishReason.CANCELLED
        assert result.finish_reason is expected

    def test_cancel_inside_a_callback(self, draft: str, temperature: float, position: int) -> None:
        engine = twin_engine(draft)
        seen: list[int] = []

        def on_token(token: int, text: str) -> None:
            seen.append(token)
            if len(seen) > position:
                assert engine.cancel("mine")

        result = self.run(engine, temperature, on_token=on_token, request_id="mine")
        assert result.token_ids == seen == truth(temperature)[: position + 1]
        assert result.finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize("rounds", range(4))
def test_a_round_that_ends_after_the_deadline_is_not_emitted(rounds: int) -> None:
    """Each pass takes 1 s: a deadline of r + 0.5 s lets exactly r rounds through."""
    clock = VirtualClock()
    config = MockConfig(vocab_size=VOCAB, seed=3, seconds_per_pass=1.0)
    engine = Engine.load(MockBackend(config, clock=clock), draft="ngram", width=0, clock=clock)
    result = engine.generate(PROMPT, seed=9, max_tokens=8, deadline_s=rounds + 0.5)
    assert result.finish_reason is FinishReason.DEADLINE
    assert result.token_ids == truth(1.0)[:rounds]
    assert clock.now() == rounds + 1


def test_a_waiting_request_past_its_deadline_ends() -> None:
    clock = VirtualClock()
    config = MockConfig(seed=3, seconds_per_pass=1.0)
    engine = Engine.load(MockBackend(config, clock=clock), max_batch=1, clock=clock)
    first = Request(prompt=[1], max_tokens=5)
    second = Request(prompt=[1], max_tokens=5, deadline_s=2.5)
    results = engine.generate([first, second])
    assert [r.finish_reason for r in results] == [FinishReason.LENGTH, FinishReason.DEADLINE]
    assert results[1].token_ids == []


def test_ignore_eos() -> None:
    token = truth(1.0)[2]
    engine = twin_engine(eos_ids=(token,))
    result = engine.generate(PROMPT, seed=9, max_tokens=LONG, ignore_eos=True)
    assert result.token_ids == truth(1.0)


def test_other_seeds_other_tokens() -> None:
    engine = twin_engine()
    outputs = {tuple(engine.generate(PROMPT, seed=seed, max_tokens=LONG).token_ids) for seed in range(20)}
    assert len(outputs) == 20


def test_without_a_seed_the_reported_seed_and_rule_repeat_the_run() -> None:
    engine = twin_engine("model")
    first = engine.generate(PROMPT, max_tokens=LONG)
    assert first.rule == "rejection"
    again = engine.generate(PROMPT, max_tokens=LONG, seed=first.seed, accept=first.rule)
    assert again.token_ids == first.token_ids
    assert engine.generate(PROMPT, max_tokens=LONG).token_ids != first.token_ids
