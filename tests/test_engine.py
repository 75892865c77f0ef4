"""The engine as its callers see it: generate, stream, astream, callbacks, cancellation, fallbacks, faults."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.backends.base import Spans
from outrider.backends.mock import MockBackend, mock_tokenizer
from outrider.config import MockConfig, SchedulerConfig
from outrider.draft.lookup import ScriptedDrafter
from outrider.draft.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.errors import BackendError, DraftError, OutriderError, RequestError, TokenRangeError, VocabularyError
from outrider.types import FinishReason, Job, Request, Scores, Slot

from conftest import drafter_of

CONFIG = MockConfig(vocab_size=26, seed=3)
DRAFT = replace(CONFIG, drift=0.6)


def load(target: MockConfig = CONFIG, draft: Any = DRAFT, **settings: Any) -> Engine:
    """Width 4 unless told otherwise: what is tested here must not depend on what happens to pay."""
    if draft not in (None, "none"):
        settings.setdefault("width", 4)
    return Engine.load(
        MockBackend(target),
        draft=MockBackend(draft) if isinstance(draft, MockConfig) else draft,
        tokenizer=mock_tokenizer(target.vocab_size),
        **settings,
    )


def nothing_left(engine: Engine, within_s: float = 0.0) -> None:
    """Everything is free, once the round under way (if any) is over."""
    until = time.monotonic() + within_s
    while engine.num_requests and time.monotonic() < until:
        time.sleep(0.001)
    assert engine.num_requests == 0
    assert engine.loop.target.num_slots == 0
    assert not isinstance(drafter_of(engine), ModelDrafter) or drafter_of(engine).backend.num_slots == 0


def test_the_readme_example() -> None:
    engine = outrider.Engine.load("mock")
    result = engine.generate(" the rider", max_tokens=12, seed=1)
    assert len(result.token_ids) == 12 and result.rule == "coupled" and engine.is_ready
    plain = engine.generate(" the rider", max_tokens=12, seed=1, width=0)
    assert plain.text == result.text


def test_prompts_as_text_ids_requests_and_lists() -> None:
    engine = load()
    text, ids = " the rider", mock_tokenizer(26).encode(" the rider")
    one = engine.generate(text, max_tokens=5, seed=4)
    assert engine.generate(ids, max_tokens=5, seed=4).token_ids == one.token_ids
    assert engine.generate(tuple(ids), max_tokens=5, seed=4).token_ids == one.token_ids
    request = Request.of(text, {"max_tokens": 5, "seed": 4})
    assert engine.generate(request).token_ids == one.token_ids
    several = engine.generate([text, ids, [1, 2]], max_tokens=5, seed=4)
    assert [r.token_ids for r in several[:2]] == [one.token_ids] * 2
    assert len(several) == 3


def test_events_tell_where_tokens_came_from() -> None:
    engine = load(width=3)
    events = list(engine.stream(" the", max_tokens=30, seed=2))
    result = events[-1].result
    assert [token for event in events for token in event.tokens] == result.token_ids
    assert "".join(event.text for event in events) == result.text
    assert all(event.result is None for event in events[:-1])
    for event in events:
        assert event.tokens[: event.accepted] == event.drafts[: event.accepted]
        assert len(event.tokens) <= event.accepted + 1
    kinds = {(len(event.drafts) > 0, event.accepted == len(event.drafts)) for event in events}
    assert (True, True) in kinds and (True, False) in kinds  # bonus rounds and replacements both occur
    nothing_left(engine)


def test_streams_side_by_side_share_passes() -> None:
    engine = load(threaded=False)
    alone = [engine.generate([b, 1], seed=b, max_tokens=20).token_ids for b in range(3)]
    engine.loop.target.num_passes = 0
    streams = [engine.stream([b, 1], seed=b, max_tokens=20) for b in range(3)]
    outputs = [list(stream)[-1].result for stream in streams]
    assert [r.token_ids for r in outputs] == alone
    assert engine.loop.target.num_passes == max(r.statistics.rounds for r in outputs)


def test_async_and_sync_streams_are_alike() -> None:
    engine = load()

    async def read(seed: int) -> list[Any]:
        return [event async for event in engine.astream(" the", max_tokens=15, seed=seed)]

    async def read_all() -> list[list[Any]]:
        return await asyncio.gather(*(read(seed) for seed in range(4)))

    for seed, events in enumerate(asyncio.run(read_all())):
        expected = list(engine.stream(" the", max_tokens=15, seed=seed))
        assert [(e.tokens, e.text, e.drafts, e.accepted) for e in events] == [
            (e.tokens, e.text, e.drafts, e.accepted) for e in expected
        ]
        assert events[-1].result.token_ids == expected[-1].result.token_ids
    nothing_left(engine)


def test_leaving_an_async_stream_frees_everything() -> None:
    engine = load()

    async def leave() -> None:
        stream = engine.astream(" the", seed=1)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    nothing_left(engine, within_s=1.0)


def test_cancelling_the_task_of_an_async_stream_frees_everything() -> None:
    engine = load(replace(CONFIG, seconds_per_pass=0.01))

    async def cancel() -> None:
        async def read() -> None:
            async for _ in engine.astream(" the", seed=1):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    nothing_left(engine, within_s=1.0)


@pytest.mark.parametrize("threaded", [True, False])
def test_leaving_a_stream_frees_everything(threaded: bool) -> None:
    engine = load(replace(CONFIG, seconds_per_pass=0.005), threaded=threaded)
    with engine.stream(" the", seed=1) as stream:
        next(stream)
    nothing_left(engine)
    stream = engine.stream(" the", seed=1)
    next(stream)
    del stream
    if not threaded:
        engine.step()
    nothing_left(engine, within_s=1.0)


@pytest.mark.parametrize("how", ["engine", "stream"])
def test_cancel_from_another_thread_ends_within_a_round(how: str) -> None:
    engine = load(replace(CONFIG, seconds_per_pass=0.02), width=2)
    stream = engine.stream(" the", seed=1, request_id="mine")
    passes = []

    def cancel() -> None:
        time.sleep(0.13)
        passes.append(engine.loop.target.num_passes)
        if how == "engine":
            assert engine.cancel("mine")
        else:
            stream.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    result = list(stream)[-1].result
    thread.join()
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.token_ids == engine.generate(" the", seed=1, max_tokens=len(result.token_ids)).token_ids
    assert passes[0] <= result.statistics.passes + 1 <= passes[0] + 1
    assert not engine.cancel("mine")
    nothing_left(engine)


def test_cancel_while_waiting_in_line() -> None:
    engine = load(max_batch=1, threaded=False)  # else the first may have ended before the second is cancelled
    first, second = engine.stream(" the", seed=1, max_tokens=30), engine.stream(" the", seed=2, max_tokens=30)
    next(first)
    second.cancel()
    assert [event.result.finish_reason for event in second] == [FinishReason.CANCELLED]
    assert list(first)[-1].result.finish_reason is FinishReason.LENGTH
    nothing_left(engine)


def test_the_draft_stops_within_one_step_of_a_cancel() -> None:
    class Nosy(MockBackend):
        """Its second pass comes after somebody cancelled the request."""

        def score(self, spans: Spans) -> Scores:
            scores = super().score(spans)
            engine.cancel("mine")
            return scores

    engine = load(draft=Nosy(DRAFT), width=8)
    result = engine.generate(" the", seed=1, max_tokens=20, request_id="mine")
    assert result.finish_reason is FinishReason.CANCELLED and result.token_ids == []
    assert drafter_of(engine).backend.num_passes == 1
    nothing_left(engine)


def test_many_threads_drive_one_engine() -> None:
    engine = load(max_batch=4)
    expected = {seed: engine.generate(" the", seed=seed, max_tokens=40).token_ids for seed in range(8)}
    outputs: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        if seed % 2:
            outputs[seed] = engine.generate(" the", seed=seed, max_tokens=40).token_ids
        else:
            outputs[seed] = list(engine.stream(" the", seed=seed, max_tokens=40))[-1].result.token_ids

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == expected
    nothing_left(engine)


def test_threads_and_event_loops_in_disorder() -> None:
    """Blocking, streaming, leaving and awaiting callers at once: everybody gets the whole answer, nothing is left."""
    engine = load(max_batch=6)
    expected = {seed: engine.generate([1], seed=seed, max_tokens=20).token_ids for seed in range(10)}
    wrong: list[str] = []

    async def await_events(seed: int) -> list[Any]:
        return [event async for event in engine.astream([1], seed=seed, max_tokens=20)]

    def work(number: int) -> None:
        dice = random.Random(number)
        for _ in range(25):
            seed, kind = dice.randrange(10), dice.choice(["generate", "stream", "leave", "await"])
            if kind == "leave":
                stream = engine.stream([1], seed=seed)
                for _ in range(dice.randrange(3)):
                    next(stream)
                dice.choice([stream.close, stream.cancel])()
                continue
            if kind == "generate":
                result = engine.generate([1], seed=seed, max_tokens=20)
            else:
                events = (
                    list(engine.stream([1], seed=seed, max_tokens=20))
                    if kind == "stream"
                    else asyncio.run(await_events(seed))
                )
                result = events[-1].result
                if [token for event in events for token in event.tokens] != expected[seed]:
                    wrong.append(kind)
            if result is None or result.token_ids != expected[seed]:
                wrong.append(kind)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    nothing_left(engine, within_s=1.0)


def test_a_callback_that_raises_reaches_the_caller_and_spares_the_others() -> None:
    engine = load()

    def angry(token: int, text: str) -> None:
        raise ValueError("mine")

    stream = engine.stream(" the", seed=2, max_tokens=6)
    with pytest.raises(ValueError, match="mine"):
        engine.generate(" the", seed=1, on_token=angry)
    assert list(stream)[-1].result.token_ids == engine.generate(" the", seed=2, max_tokens=6).token_ids
    nothing_left(engine)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("draft", [DRAFT, "ngram"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_any_chunking_of_the_prompt(chunk: int, draft: Any, rule: str) -> None:
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7]
    whole = load(draft=draft).generate(prompt, seed=5, max_tokens=15, accept="coupled")
    engine = load(draft=draft, prefill_chunk=chunk)
    result = engine.generate(prompt, seed=5, max_tokens=15, accept=rule)
    if rule == "coupled":
        assert result.token_ids == whole.token_ids
    assert engine.loop.target.num_passes == -(-len(prompt) // chunk) - 1 + result.statistics.rounds


def test_the_draft_reads_a_token_once() -> None:
    """R14: after a round it reads at most accepted + 1 new tokens, never the history."""
    engine = load(width=4, threaded=False)
    draft, fed = drafter_of(engine).backend, []
    events = engine.stream(list(range(20)), seed=5, max_tokens=60)
    accepted = []
    for event in events:
        fed.append(draft.num_tokens_fed)
        accepted.append(event.accepted)
    assert fed[0] <= 20 + 3
    for before, after, kept in zip(fed, fed[1:], accepted, strict=False):
        assert after - before <= kept + 1 + 3  # and its own drafts but the last


def test_the_draft_catches_up_in_chunks() -> None:
    engine = load(prefill_chunk=4, width=3)
    sizes = []
    score = drafter_of(engine).backend.score

    def watched(spans: Spans) -> Scores:
        sizes.append(max(spans.counts))
        return score(spans)

    drafter_of(engine).backend.score = watched
    result = engine.generate(list(range(22)), seed=5, max_tokens=10)
    assert max(sizes) <= 4 and result.statistics.drafted > 0
    assert result.token_ids == load(width=0).generate(list(range(22)), seed=5, max_tokens=10).token_ids


# ---- fallbacks are told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        (
            replace(CONFIG, max_rewind=0),
            DRAFT,
            "the target cannot rewind: one draft a round, verified before it is fed",
        ),
        (replace(CONFIG, max_rewind=2), DRAFT, "the target can rewind only 2 tokens"),
        (CONFIG, replace(DRAFT, max_rewind=0), "the draft can rewind only 0 tokens"),
        (CONFIG, replace(DRAFT, context=10), "the answer is past the draft's context of 10 tokens"),
        (CONFIG, replace(DRAFT, context=2), "the answer is past the draft's context of 2 tokens"),
        (CONFIG, replace(DRAFT, max_slots=0), "the draft has no room for another sequence"),
    ],
)
def test_fallbacks_are_counted_with_their_reason(target: MockConfig, draft: MockConfig, reason: str) -> None:
    engine = load(target, draft, width=4)
    result = engine.generate([1, 2], seed=5, max_tokens=20)
    ending = f"the answer comes to the end of the draft's context of {draft.context} tokens"
    assert set(result.statistics.fallbacks) - {reason} <= {ending}
    assert result.statistics.fallbacks[reason] > 0
    assert engine.statistics.fallbacks == result.statistics.fallbacks
    assert result.token_ids == load(width=0).generate([1, 2], seed=5, max_tokens=20).token_ids


def test_a_target_that_cannot_rewind_is_not_drafted_for_unasked() -> None:
    engine = load(replace(CONFIG, max_rewind=0), width=None)
    counts = engine.generate([1, 2], seed=5, max_tokens=20).statistics
    assert counts.drafted == 0
    assert counts.fallbacks == {"the target cannot rewind, so drafting saves no pass": 19}


@pytest.mark.parametrize("limits", [{"context": 8}, {"max_slots": 0}])
def test_a_draft_that_cannot_read_a_long_prompt_says_why(limits: dict[str, int]) -> None:
    engine = load(draft=replace(DRAFT, **limits), prefill_chunk=4)
    counts = engine.generate(list(range(20)), seed=5, max_tokens=6).statistics
    reason = "no room for another sequence" if "max_slots" in limits else "past the draft's context of 8 tokens"
    told = [fallback for fallback in counts.fallbacks if reason in fallback]
    assert len(told) == 1 and counts.fallbacks[told[0]] >= 4


def test_a_job_past_the_drafts_context_gives_its_place_back() -> None:
    engine = load(draft=replace(DRAFT, context=8, max_slots=1))
    long = engine.stream(list(range(6)), seed=1, max_tokens=100)
    for _ in range(8):
        next(long)
    assert engine.generate([1], seed=1, max_tokens=5).statistics.drafted > 0
    long.close()
    nothing_left(engine)


def test_a_drafter_made_by_hand_reads_at_its_own_pace() -> None:
    engine = Engine.load(MockBackend(CONFIG), draft=ModelDrafter(MockBackend(DRAFT), chunk=8), prefill_chunk=16)
    assert engine.generate(list(range(26)) * 2, seed=1, max_tokens=20, width=4).statistics.drafted > 0
    with pytest.raises(VocabularyError):
        Engine.load(MockBackend(CONFIG), draft=ModelDrafter(MockBackend(MockConfig(vocab_size=9))))


def test_a_target_that_cannot_rewind_takes_one_pass_a_token() -> None:
    engine = load(replace(CONFIG, max_rewind=0), replace(CONFIG, drift=0.0), width=4)
    counts = engine.generate([1, 2], seed=5, max_tokens=20).statistics
    assert counts.rounds == counts.tokens == engine.loop.target.num_passes == 20
    assert counts.drafted == counts.accepted == 19 and counts.bonus == 0


def test_waiting_for_a_slot_is_no_error() -> None:
    engine = load(replace(CONFIG, max_slots=1), "ngram")
    assert len(engine.generate([[1], [2], [3]], seed=1, max_tokens=4)) == 3


# ---- faults end the requests they touch, never the engine ----------------------------------------------------------


class Faulty(MockBackend):
    """A model that breaks while `broken` says how."""

    broken = ""

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        scores = super().score(spans)
        if self.broken == "nan":
            scores.logits = scores.logits.copy()
            scores.logits[0, 3] = np.nan
        if self.broken == "shape":
            scores.logits = scores.logits[:, :-1]
        if self.broken == "rows":
            scores.logits = scores.logits[:-1]
        if self.broken == "crash":
            raise RuntimeError("out of memory")
        return scores


@pytest.mark.parametrize(
    ("side", "broken", "error", "message"),
    [
        ("target", "nan", BackendError, "NaN logits"),
        ("target", "shape", BackendError, r"shape \(\d, 25\), wanted \(\d, 26\)"),
        ("target", "rows", BackendError, r"shape \(\d, 26\), wanted"),
        ("target", "crash", BackendError, "out of memory"),
        ("draft", "nan", DraftError, "NaN logits"),
        ("draft", "crash", DraftError, "out of memory"),
    ],
)
def test_a_broken_model_is_said_and_survived(side: str, broken: str, error: type[Exception], message: str) -> None:
    models = {"target": Faulty(CONFIG), "draft": Faulty(DRAFT)}
    engine = Engine.load(models["target"], draft=models["draft"], width=3)
    expected = engine.generate([1, 2], seed=5, max_tokens=8).token_ids
    models[side].broken = broken
    with pytest.raises(error, match=message):
        engine.generate([1, 2], seed=5, max_tokens=8)
    nothing_left(engine)
    models[side].broken = ""
    assert engine.generate([1, 2], seed=5, max_tokens=8).token_ids == expected


def test_nan_rows_end_their_own_request_only() -> None:
    target = Faulty(CONFIG)
    engine = Engine.load(target, draft="none")
    expected = engine.generate([2], seed=6, max_tokens=6)
    target.broken = "nan"  # the first row of a pass is the first request's
    with pytest.raises(BackendError) as caught:
        engine.generate([[1], [2]], seed=6, max_tokens=1)
    assert caught.value.results[0] is None
    assert caught.value.results[1].token_ids == expected.token_ids[:1]
    nothing_left(engine)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda tokens, width: [26], "token 26; ids run from 0 to 25"),
        (lambda tokens, width: [-1], "token -1"),
        (lambda tokens, width: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_broken_drafter_is_said(script: Any, message: str) -> None:
    engine = load(draft=ScriptedDrafter(script))
    with pytest.raises(DraftError, match=message):
        engine.generate([1], max_tokens=5)
    nothing_left(engine)
    assert len(engine.generate([1], max_tokens=5, width=0).token_ids) == 5


def test_a_drafter_that_proposes_too_much_is_refused() -> None:
    class Eager(ScriptedDrafter):
        def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Any:
            return super().propose(jobs, [width + 1 for width in widths], trees)

    engine = load(draft=Eager(lambda tokens, width: [0] * width))
    with pytest.raises(DraftError, match="proposed \\[5\\] tokens where \\[4\\] were allowed"):
        engine.generate([1], max_tokens=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": []}, "proposed \\[\\] tokens where \\[4\\] were allowed"),
        ({"tokens": np.zeros(3, dtype=np.int64)}, "tokens of shape \\(3,\\) for 4 whole numbers"),
        ({"probs": np.ones((4, 25), dtype=np.float32)}, "rows of shape \\(4, 25\\), wanted \\(4, 26\\)"),
    ],
)
def test_drafts_of_the_wrong_shape_are_refused(change: dict[str, Any], message: str) -> None:
    class Odd(ScriptedDrafter):
        def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Any:
            return replace(super().propose(jobs, widths, trees), **change)

    engine = load(draft=Odd(lambda tokens, width: [0] * width))
    with pytest.raises(DraftError, match=message):
        engine.generate([1], max_tokens=8)
    nothing_left(engine)


class Interrupted(MockBackend):
    """Ctrl-C is pressed during its first pass."""

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        if self.num_passes == 0:
            self.num_passes += 1
            raise KeyboardInterrupt
        return super().score(spans, hidden)


def test_an_interrupt_leaves_nothing_behind() -> None:
    engine = Engine.load(Interrupted(CONFIG), threaded=False)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([1])
    nothing_left(engine)
    assert len(engine.generate([1], max_tokens=3).token_ids) == 3


def test_an_interrupt_on_the_engines_thread_ends_one_step() -> None:
    engine = Engine.load(Interrupted(CONFIG))
    with pytest.raises(BackendError, match=r"interrupted \(KeyboardInterrupt\); ask again"):
        engine.generate([1])
    nothing_left(engine, within_s=1.0)
    assert len(engine.generate([1], max_tokens=3).token_ids) == 3


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_an_interrupt_of_a_waiting_caller_ends_its_request(how: str) -> None:
    """Python delivers Ctrl-C to the main thread, which waits for the answer. Others go on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    engine = load(replace(CONFIG, seconds_per_pass=0.005), width=0)
    other = engine.stream([2], seed=1, max_tokens=60)
    timer = threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        if how == "generate":
            engine.generate([1])
        else:
            with engine.stream([1]) as stream:
                list(stream)
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert engine.num_requests == 1
    assert len(list(other)[-1].result.token_ids) == 60
    nothing_left(engine, within_s=1.0)


def test_other_callers_of_an_interrupted_pass_get_an_error_not_the_interrupt() -> None:
    engine = Engine.load(Interrupted(CONFIG), threaded=False)
    stream = engine.stream([1])
    with pytest.raises(KeyboardInterrupt):
        engine.generate([1])
    with pytest.raises(BackendError, match=r"interrupted \(KeyboardInterrupt\); ask again"):
        next(stream)


def test_a_callback_may_not_drive_its_engine() -> None:
    engine = load()

    def greedy(token: int, text: str) -> None:
        engine.generate([1], max_tokens=1)

    with pytest.raises(RequestError, match="a callback cannot wait for another answer of its engine"):
        engine.generate([1], on_token=greedy)
    nothing_left(engine)


def test_a_callback_may_close_its_engine() -> None:
    engine = load(width=4)
    result = engine.generate([1], seed=1, on_token=lambda token, text: engine.close())
    assert result.finish_reason is FinishReason.CANCELLED and len(result.token_ids) == 1
    nothing_left(engine)


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [("keep", BackendError, "the target failed while rewinding"), ("rewind", DraftError, "the model draft failed")],
)
def test_a_model_that_fails_to_go_back_is_said(
    method: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: MockBackend, *_: Any) -> None:
        raise RuntimeError("lost")

    engine = load(draft=replace(CONFIG, drift=3.0))
    model = engine.loop.target if method == "keep" else drafter_of(engine).backend
    monkeypatch.setattr(model, method, fail.__get__(model))
    with pytest.raises(error, match=f"{message}: RuntimeError: lost"):
        engine.generate([1], seed=1, max_tokens=30)
    nothing_left(engine)


@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_model_that_fails_to_open_fails_one_request_only(side: str) -> None:
    class Full(MockBackend):
        broken = True

        def open(self, *arguments: Any) -> Any:
            if self.broken:
                raise MemoryError("no pages")
            return super().open(*arguments)

    models = {"target": MockBackend(CONFIG), "draft": MockBackend(DRAFT), side: Full(CONFIG)}
    engine = Engine.load(models["target"], draft=models["draft"], width=4)
    kind = BackendError if side == "target" else DraftError
    with pytest.raises(kind, match="MemoryError: no pages"):
        engine.generate([1], seed=1, max_tokens=4)
    nothing_left(engine)
    if side == "draft":
        assert len(engine.generate([1], max_tokens=4, width=0).token_ids) == 4
    models[side].broken = False
    assert len(engine.generate([1], max_tokens=4).token_ids) == 4


def test_a_target_without_room_for_anybody_says_so() -> None:
    engine = load(replace(CONFIG, max_slots=0), "ngram")
    with pytest.raises(BackendError, match="no room for a single sequence"):
        engine.generate([1])
    nothing_left(engine)


def test_a_drafter_that_fails_spares_requests_without_drafts() -> None:
    def fail(tokens: Sequence[int], width: int) -> list[int]:
        raise RuntimeError("no idea")

    engine = load(draft=ScriptedDrafter(fail))
    plain = engine.stream([1], seed=1, max_tokens=6, width=0)
    with pytest.raises(DraftError, match="no idea"):
        engine.generate([1], seed=1, max_tokens=6)
    assert len(list(plain)[-1].result.token_ids) == 6


def test_a_wrong_proposal_fails_its_own_request_only() -> None:
    engine = load(draft=ScriptedDrafter(lambda tokens, width: [99] if tokens[0] == 2 else [0] * width))
    good, bad = engine.stream([1], seed=1, max_tokens=9), engine.stream([2], seed=1, max_tokens=9)
    with pytest.raises(DraftError, match="token 99"):
        list(bad)
    assert list(good)[-1].result.token_ids == engine.generate([1], seed=1, max_tokens=9, width=0).token_ids


def test_a_finished_answer_survives_a_drafter_that_fails_afterwards() -> None:
    class Forgetful(ScriptedDrafter):
        def observe(self, *_: Any) -> int:
            raise RuntimeError("lost")

        def forget(self, job: Job) -> None:
            raise RuntimeError("lost too")

    engine = load(draft=Forgetful(lambda tokens, width: []))
    other = engine.stream([1], seed=1, max_tokens=5)
    assert len(engine.generate([1], seed=1, max_tokens=1).token_ids) == 1
    with pytest.raises(DraftError, match="lost"):
        list(other)
    nothing_left(engine)


def test_every_caller_of_a_broken_pass_has_an_error_of_its_own() -> None:
    target = Faulty(CONFIG)
    engine = Engine.load(target, threaded=False)
    streams = [engine.stream([1]) for _ in range(2)]
    target.broken = "crash"
    errors = []
    for stream in streams:
        with pytest.raises(BackendError) as caught:
            next(stream)
        errors.append(caught.value)
    assert errors[0] is not errors[1] and str(errors[0]) == str(errors[1])


def test_a_stream_that_is_gone_cannot_cancel_a_namesake() -> None:
    engine = load()
    first = engine.stream([1], seed=1, max_tokens=3, request_id="chat")
    list(first)
    second = engine.stream([1], seed=1, max_tokens=9, request_id="chat")
    next(second)
    first.cancel()
    del first
    assert list(second)[-1].result.finish_reason is FinishReason.LENGTH


def test_async_streams_cancelled_twice_leave_nothing() -> None:
    """Cancel scopes deliver a cancellation again at the next await: cleaning up must not need one."""
    engine = load(replace(CONFIG, seconds_per_pass=0.002), max_batch=8)

    async def run() -> None:
        async def read() -> None:
            async for _ in engine.astream([1], seed=1):
                pass

        tasks = [asyncio.create_task(read()) for _ in range(40)]
        await asyncio.sleep(0.1)
        for _ in range(2):
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    nothing_left(engine, within_s=1.0)


def test_an_async_reader_does_not_wait_for_those_in_line() -> None:
    """100 requests in line hold no thread: the first answer arrives while the others wait."""
    engine = load(replace(CONFIG, seconds_per_pass=0.004), max_batch=1)
    done: list[int] = []

    async def read(number: int) -> None:
        async for _ in engine.astream([1], seed=number, max_tokens=4, width=0):
            pass
        done.append(number)
        if number == 0:
            assert engine.num_requests > 50  # it was read while the others waited

    async def run() -> None:
        await asyncio.gather(*(read(number) for number in range(100)))

    asyncio.run(run())
    assert sorted(done) == list(range(100))
    nothing_left(engine)


def test_a_callback_that_raises_stop_iteration_is_no_quiet_end() -> None:
    engine = load()
    with pytest.raises(RuntimeError, match="on_token raised StopIteration"):
        list(engine.stream([1], on_token=lambda token, text: next(iter([]))))


def test_what_a_callback_is_shown_adds_up_to_the_text() -> None:
    engine = load()
    for stop in ([], ["hh"], [" rider x"]):
        for seed in range(20):
            pieces: list[str] = []
            settings = {"seed": seed, "max_tokens": 12, "stop": stop, "stop_ids": [5]}
            result = engine.generate([1], on_token=lambda token, text, p=pieces: p.append(text), **settings)
            assert "".join(pieces) == result.text


@pytest.mark.parametrize(
    "bad",
    [
        {"banned": (value for value in [1])},
        {"banned": 3},
        {"processors": lambda tokens, row: row},
        {"processors": [5]},
        {"stop_ids": (value for value in [1])},
        {"stop_ids": 2},
        {"stop": (value for value in ["a"])},
        {"logit_bias": [1, 2]},
        {"sampling": {}},
        {"on_token": 5},
        {"on_token": asyncio.sleep},
        {"request_id": [1]},
    ],
)
def test_a_bad_value_is_refused_before_it_can_hurt_others(bad: dict[str, Any]) -> None:
    engine = load()
    stream = engine.stream([1], seed=1, max_tokens=5)
    with pytest.raises(RequestError) as caught:
        engine.generate([1], **bad)
    assert caught.value.param == next(iter(bad))
    assert len(list(stream)[-1].result.token_ids) == 5


def test_collections_are_taken_as_they_were_when_asked() -> None:
    engine = load()
    bias, banned = {2: 5.0}, np.asarray([3, 4])
    stream = engine.stream([1], seed=1, max_tokens=20, logit_bias=bias, banned=banned)
    first = next(stream).tokens
    bias[99], banned[:] = 1.0, 2
    tokens = first + [token for event in stream for token in event.tokens]
    assert 2 in tokens and not {3, 4} & set(tokens)


def test_none_is_not_given() -> None:
    engine = load()
    given = engine.generate([1], seed=1, max_tokens=5, stop=None, stop_ids=None, logit_bias=None, top_k=None)
    assert given.token_ids == engine.generate([1], seed=1, max_tokens=5).token_ids


def test_a_tokenizer_that_does_not_fit_is_said() -> None:
    small, large = mock_tokenizer(5), mock_tokenizer(40)
    engine = Engine.load(MockBackend(CONFIG), tokenizer=small)
    with pytest.raises(BackendError, match="the tokenizer failed on token"):
        engine.generate([1], seed=1, max_tokens=20)
    engine = Engine.load(MockBackend(CONFIG), tokenizer=large)
    with pytest.raises(TokenRangeError, match="token id"):
        engine.generate(" rain")


def test_names_do_not_collide() -> None:
    engine = load(threaded=False)  # all of them are in flight
    mine = engine.stream([1], seed=1, max_tokens=5, request_id="request-2")
    streams = [engine.stream([1], seed=1, max_tokens=5) for _ in range(3)]
    assert len({mine.request_id, *(stream.request_id for stream in streams)}) == 4


def test_a_mistake_has_one_class_at_any_width() -> None:
    engine = load()
    for width in (0, 4):
        with pytest.raises(RequestError, match="leave no token"):
            engine.generate([1], banned=range(26), width=width)
        with pytest.raises(RequestError, match="a logits processor failed"):
            engine.generate([1], processors=[lambda tokens, row: 1 / 0], width=width)


@pytest.mark.parametrize("draft", ["scripted", "model"])
def test_a_processor_that_refuses_texts_that_never_were_does_no_harm(draft: str) -> None:
    def never_five(tokens: Sequence[int], row: Any) -> Any:
        assert 5 not in tokens
        row[5] = -np.inf
        return row

    drafter = ScriptedDrafter(lambda tokens, width: [5] * width) if draft == "scripted" else DRAFT
    engine = load(draft=drafter)
    settings = {"seed": 1, "max_tokens": 20, "processors": [never_five]}
    assert engine.generate([1], **settings).token_ids == engine.generate([1], width=0, **settings).token_ids


def test_callers_of_several_threads_are_served_in_turn() -> None:
    """A long answer driven by one thread does not hold up a short one of another, nor a close."""
    engine = load(replace(CONFIG, seconds_per_pass=0.003), "ngram")
    long = threading.Thread(target=lambda: engine.generate([1], seed=1, max_tokens=400, width=0))
    long.start()
    time.sleep(0.05)
    for _ in range(5):
        started = time.monotonic()
        engine.generate([1], seed=2, max_tokens=3, width=0)
        assert time.monotonic() - started < 0.2  # 3 passes of 3 ms; the long answer would take over a second
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 0.2
    long.join()
    nothing_left(engine)


@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError, KeyError])
def test_what_a_callback_raises_is_its_own_callers(raised: type[BaseException]) -> None:
    def leave(token: int, text: str) -> None:
        raise raised("mine")

    engine = load()
    other = engine.stream([1], seed=1, max_tokens=5)
    with pytest.raises(raised):
        engine.generate([1], on_token=leave)
    assert len(list(other)[-1].result.token_ids) == 5

    async def run() -> int:
        with pytest.raises(raised):
            async for _ in engine.astream([1], on_token=leave):
                pass
        return len([event async for event in engine.astream([1], seed=1, max_tokens=5)])

    assert asyncio.run(asyncio.wait_for(run(), 5)) > 0
    nothing_left(engine, within_s=1.0)


@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError, GeneratorExit, KeyError])
def test_what_a_processor_raises_ends_its_own_request_only(raised: type[BaseException]) -> None:
    """Exceptions that are no `Exception` too. Requests that wait, and later ones, are answered."""

    def leave(tokens: Sequence[int], row: Any) -> Any:
        raise raised("mine")

    engine = load(draft="none", max_batch=1)
    bad = Request.of([1], {"processors": [leave], "max_tokens": 3})
    first, waiting = engine.open_streams([bad, Request.of([1], {"seed": 1, "max_tokens": 5})])
    with pytest.raises(OutriderError):
        list(first)
    reader = threading.Thread(target=lambda: list(waiting), daemon=True)
    reader.start()
    reader.join(5.0)
    assert waiting.result is not None and len(waiting.result.token_ids) == 5
    assert len(engine.generate([1], max_tokens=5).token_ids) == 5


@pytest.mark.parametrize("call", ["close", "snapshot"])
def test_a_call_while_the_engine_is_being_paused_returns(call: str, tmp_path: Path) -> None:
    """`pause` waits for the present step. What is called meanwhile must not wait for a step that never comes."""
    engine = load(replace(CONFIG, seconds_per_pass=0.2), "none")
    stream = engine.stream([1])
    next(stream)
    pause = threading.Thread(target=engine.pause)
    pause.start()
    time.sleep(0.05)
    work = stream.close if call == "close" else lambda: engine.snapshot(tmp_path / "state")
    caller = threading.Thread(target=work, daemon=True)
    caller.start()
    caller.join(5.0)
    pause.join()
    assert not caller.is_alive()


def test_a_drafter_that_misbehaves_touches_only_those_it_drafts_for() -> None:
    class Odd(ScriptedDrafter):
        change: dict[str, Any] = {}  # noqa: RUF012
        returned: Any = 0

        def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Any:
            return replace(super().propose(jobs, widths, trees), **self.change)

        def observe(self, *_: Any) -> Any:
            return self.returned

    drafter = Odd(lambda tokens, width: [0] * width)
    engine = load(draft=drafter)
    uniform = np.full((4, 26), 1 / 26, dtype=np.float32)
    for change, returned, message in [
        ({"fallbacks": ["because"]}, 0, "the scripted draft failed"),
        ({"counts": [-1]}, 0, "proposed"),
        ({"tokens": np.full(4, 1.7)}, 0, "float64 tokens"),
        ({"probs": uniform * 2}, 0, "no distributions"),
        ({"probs": uniform - 0.5}, 0, "no distributions"),
        ({"probs": uniform * np.nan}, 0, "no distributions"),
        ({}, None, "observe\\(\\) must return the number of passes"),
    ]:
        drafter.change, drafter.returned = {}, 0
        plain = engine.stream([1], seed=1, max_tokens=6, width=0)
        next(plain)
        drafted = engine.stream([1], seed=1, max_tokens=6)
        drafter.change, drafter.returned = change, returned
        if change:  # the plain neighbour shares the pass: shapes are those of one drafting job
            plain.close()
        with pytest.raises(DraftError, match=message):
            list(drafted)
        if not change:
            assert len(list(plain)[-1].result.token_ids) == 5 + 1
    nothing_left(engine)


def test_a_drafter_sees_no_job_after_it_was_told_to_forget_it() -> None:
    class Strict(ScriptedDrafter):
        known: set[int] = set()  # noqa: RUF012

        def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Any:
            self.known |= {job.id for job in jobs}
            return super().propose(jobs, widths, trees)

        def observe(self, batch: Any, *_: Any) -> int:
            assert {job.id for job in batch.decode} <= self.known
            return 0

        def forget(self, job: Job) -> None:
            self.known.discard(job.id)

    engine = load(draft=Strict(lambda tokens, width: [0] * width))
    calls = iter(range(100))

    def angry(token: int, text: str) -> None:
        if next(calls) > 3:
            raise ValueError("mine")

    stream = engine.stream([1], seed=1, max_tokens=30)
    with pytest.raises(ValueError, match="mine"):
        engine.generate([1], seed=2, on_token=angry)
    assert len(list(stream)[-1].result.token_ids) == 30
    assert not drafter_of(engine).known


def test_a_job_seated_late_is_read_in_chunks() -> None:
    engine = load(draft=replace(DRAFT, max_slots=1), prefill_chunk=8)
    sizes = []
    score = drafter_of(engine).backend.score

    def watched(spans: Spans) -> Scores:
        sizes.append(max(spans.counts))
        return score(spans)

    drafter_of(engine).backend.score = watched
    prompts = [list(range(26)), list(range(26))]
    results = engine.generate([Request.of(prompts[b], {"seed": b, "max_tokens": 10 + 40 * b}) for b in range(2)])
    assert max(sizes) <= 8 and results[1].statistics.drafted > 0


@pytest.mark.parametrize("returned", [lambda logits: logits, lambda logits: None, lambda logits: Scores([], [1])])
def test_a_backend_that_returns_the_wrong_thing_is_said(returned: Any) -> None:
    class Odd(MockBackend):
        def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Any:
            return returned(super().score(spans).logits)

    engine = Engine.load(Odd(CONFIG))
    with pytest.raises(BackendError):
        engine.generate([1])
    nothing_left(engine)


def test_numpys_false_stops_too() -> None:
    assert len(load().generate([1], seed=1, max_tokens=9, on_token=lambda t, s: np.bool_(False)).token_ids) == 1


def test_none_keeps_the_presets_default() -> None:
    engine = Engine.load("mock")
    given = engine.generate(" the", seed=1, max_tokens=9, temperature=None)
    assert given.token_ids == engine.generate(" the", seed=1, max_tokens=9).token_ids


def test_a_result_does_not_change_afterwards() -> None:
    engine = load()
    result = engine.generate([1], seed=1, max_tokens=9)
    before = result.statistics.report()
    engine.generate([1], seed=1, max_tokens=9, width=0)
    assert result.statistics.report() == before


class SlowToClose(MockBackend):
    """Takes its time to free a sequence."""

    def close(self, slot: Slot) -> None:
        time.sleep(0.05)
        super().close(slot)


@pytest.mark.parametrize("how", ["generate", "stream", "astream", "error"])
def test_when_an_answer_is_over_all_is_free(how: str) -> None:
    """Its name can be used again at once, and its place in the line."""
    engine = Engine.load(SlowToClose(CONFIG), draft="none", scheduling=SchedulerConfig(max_batch=1, max_queue=0))

    async def read() -> None:
        async for _ in engine.astream([1], max_tokens=2, request_id="mine"):
            pass

    for _ in range(2):
        if how == "generate":
            engine.generate([1], max_tokens=2, request_id="mine")
        elif how == "stream":
            list(engine.stream([1], max_tokens=2, request_id="mine"))
        elif how == "astream":
            asyncio.run(read())
        else:
            with pytest.raises(RequestError, match="leave no token"):
                engine.generate([1], banned=range(26), request_id="mine")
        nothing_left(engine)


def test_close_ends_what_runs() -> None:
    engine = load()
    stream = engine.stream(" the", seed=1)
    next(stream)
    engine.close()
    assert not engine.is_ready
    assert list(stream)[-1].result.finish_reason is FinishReason.CANCELLED
    nothing_left(engine)


def test_user_logits_processors_hold_under_speculation() -> None:
    """No token may follow itself: a rule that needs drafted ancestors."""

    def no_repeats(tokens: Sequence[int], row: Any) -> Any:
        row[tokens[-1]] = -np.inf
        return row

    engine = load(width=5)
    settings = {"seed": 3, "max_tokens": 60, "processors": (no_repeats,)}
    result = engine.generate([1], **settings)
    assert all(a != b for a, b in zip(result.token_ids, result.token_ids[1:], strict=False))
    assert result.token_ids == engine.generate([1], width=0, **settings).token_ids
    assert result.statistics.accepted > 0


def test_a_job_whose_cache_cannot_be_shared_fails_alone() -> None:
    """It fails on its last round, when it is told to share: its neighbour goes on, and reads nothing of it."""

    class Shy(MockBackend):
        def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
            if tokens[0] == 7 and len(tokens) > 3:
                raise RuntimeError("no")

    engine = Engine.load(Shy(CONFIG), width=0)
    with pytest.raises(BackendError, match="the target failed while sharing its cache: RuntimeError: no") as caught:
        engine.generate([[7, 1], [2, 3]], max_tokens=5, seed=1)
    failed, other = caught.value.results
    assert failed is None and other is not None and len(other.token_ids) == 5
    nothing_left(engine)
    assert "prompt" not in repr(engine._intake.job(Request(prompt=[1, 2]), "name", 0.0))
