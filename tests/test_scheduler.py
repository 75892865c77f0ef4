"""Who runs when: the scheduler and its policies by themselves, and through the engine on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.backends.mock import MockBackend
from outrider.backends.paged_mock import PagedMock
from outrider.clock import VirtualClock
from outrider.config import MockConfig, SchedulerConfig
from outrider.draft.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.kv.pages import Pages
from outrider.sched import policies
from outrider.sched.policies import ByPriority, EarliestDeadline, Orca, Policy, ShortestFirst, find_policy
from outrider.sched.scheduler import OVER_BUDGET, Scheduler
from outrider.spec.router import Router
from outrider.types import Batch, FinishReason, Job, Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
MODEL = MockConfig(vocab_size=16, context=512, seconds_per_pass=0.1)


def new_job(prompt: int = 3, answer: int = 5, *, arrival: float = 0.0, **settings: Any) -> Job:
    """A job that waits; `cached` and `said` say how far it is, `draft` the width it wants."""
    said, cached = settings.pop("said", 0), settings.pop("cached", 0)
    deadline, draft = settings.pop("deadline", None), settings.pop("draft", 0)
    request = Request(prompt=[1] * prompt, sampling=GREEDY, max_tokens=answer, **settings)
    tokens = [1] * (prompt + said)
    return Job(
        request=request,
        request_id=f"{prompt}+{answer}",
        params=GREEDY,
        tokens=tokens,
        num_prompt=prompt,
        seed=0,
        rule="rejection",
        words=(0, 0),
        limit=prompt + answer,
        stop_ids=frozenset(),
        arrival=arrival,
        deadline=deadline,
        cached=cached,
        drafters=("a",) if draft else (),
        width=draft,
    )


def scheduler_of(jobs: Sequence[Job] = (), **settings: Any) -> Scheduler:
    """A scheduler in which these jobs wait."""
    clock, target = VirtualClock(), MockBackend(MODEL)
    router = Router([], target.info, clock)
    scheduler = Scheduler(SchedulerConfig(**settings), target, router, clock, max_width=16)
    for job in jobs:
        scheduler.add(job)
    return scheduler


def start_all(scheduler: Scheduler) -> list[Job]:
    """Admit all that may run; returns them in order. What they have read stays what it was."""
    read = {job.id: job.cached for job in scheduler.waiting}
    admitted = scheduler.next_batch().admitted
    for job in admitted:
        job.cached = read[job.id]
    return admitted


def num_fed(batch: Batch) -> int:
    """Tokens of a pass at most: chunks, pending tokens, drafts."""
    pending = sum(len(job.tokens) - job.cached for job in batch.decode)
    return sum(batch.chunks) + pending + sum(batch.room)


def advance(batch: Batch) -> None:
    """What a pass without drafts does to the jobs."""
    for job, chunk in zip(batch.prefill, batch.chunks, strict=True):
        job.cached += chunk
    for job in batch.decode:
        job.cached = len(job.tokens)
        job.tokens.append(2)


def numbers(jobs: Sequence[Job], order: Sequence[Job]) -> list[int]:
    return [list(jobs).index(job) for job in order]


# Policies by themselves


def test_first_come_first_served_whatever_the_length() -> None:
    jobs = [new_job(answer=answer, arrival=float(place)) for place, answer in enumerate([90, 1, 40, 2])]
    scheduler = scheduler_of([jobs[2], jobs[0], jobs[3], jobs[1]], policy="fcfs")
    assert numbers(jobs, start_all(scheduler)) == [0, 1, 2, 3]


def test_of_those_who_came_at_once_the_first_in_line_goes_first() -> None:
    jobs = [new_job() for _ in range(5)]
    for name in policies.POLICIES:
        assert numbers(jobs, start_all(scheduler_of(jobs, policy=name))) == [0, 1, 2, 3, 4], name


def test_shortest_remaining_work_first() -> None:
    jobs = [
        new_job(prompt=10, answer=50),
        new_job(prompt=10, answer=5),
        new_job(prompt=300, answer=5),  # a prompt is work, too: less than an answer
        new_job(prompt=10, answer=50, said=47),  # gave way near its end, and has to read it again
    ]
    assert numbers(jobs, start_all(scheduler_of(jobs, policy="sjf"))) == [1, 3, 2, 0]


def test_priorities_and_what_waiting_is_worth() -> None:
    low = new_job(priority="low", arrival=0.0)
    soon = [new_job(priority=priority, arrival=10.0) for priority in ("normal", "high")]
    late = [new_job(priority=priority, arrival=61.0) for priority in ("normal", "high")]
    jobs = [low, *soon, *late]
    assert numbers(jobs, start_all(scheduler_of(jobs, policy=ByPriority(ageing_s=30.0)))) == [2, 1, 0, 4, 3]
    assert numbers(jobs, start_all(scheduler_of(jobs, policy=ByPriority(ageing_s=1e6)))) == [2, 4, 1, 3, 0]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.sampled_from(ByPriority.levels)), min_size=2, max_size=12),
    st.floats(0.5, 40),
)
def test_nobody_is_overtaken_for_longer_than_ageing_allows(arrivals: list[tuple[float, str]], ageing_s: float) -> None:
    """Whoever goes first though it came later came at most two levels' worth of seconds later."""
    jobs = [new_job(arrival=arrival, priority=priority) for arrival, priority in arrivals]
    order = start_all(scheduler_of(jobs, policy=ByPriority(ageing_s)))
    for place, job in enumerate(order):
        assert all(earlier.arrival <= job.arrival + 2 * ageing_s + 1e-6 for earlier in order[:place])


def test_earliest_deadline_first_and_those_without_one_last() -> None:
    jobs = [new_job(arrival=float(place), deadline=d) for place, d in enumerate([None, 9.0, 3.0, None, 5.0])]
    assert numbers(jobs, start_all(scheduler_of(jobs, policy="edf"))) == [2, 4, 1, 0, 3]


def test_who_gives_way_and_how_much_room_is_kept() -> None:
    jobs = [new_job(answer=answer, arrival=float(place)) for place, answer in enumerate([30, 900, 20])]
    assert Policy().victim(jobs) is jobs[2], "the last to come"
    assert ShortestFirst().victim(jobs) is jobs[1], "the longest"
    jobs[0].deadline = 5.0
    assert EarliestDeadline().victim(jobs) is jobs[2] and EarliestDeadline().victim(jobs[:2]) is jobs[1]
    assert Orca().victim(jobs) is None
    assert [Orca().reserve(job) for job in jobs] == [33, 903, 23]
    assert [Policy().reserve(job) for job in jobs] == [33, 3 + policies.HEADROOM, 23]


@pytest.mark.parametrize("name", ["lifo", "", None, 3, Policy])
def test_a_policy_that_is_none_is_refused_kindly(name: object) -> None:
    with pytest.raises(ConfigError, match=r"policy is one of fcfs, sjf, priority, edf, orca or a Policy, got") as error:
        Engine(MockBackend(MODEL), scheduling=SchedulerConfig(policy=name))
    assert error.value.param == "policy"


def test_policies_are_found_by_name_or_taken_as_they_are() -> None:
    assert {name: type(find_policy(name)).name for name in policies.POLICIES} == {n: n for n in policies.POLICIES}
    own = ByPriority(ageing_s=2.0)
    assert find_policy(own) is own


# The batch of a pass


def test_the_batch_and_the_tokens_in_flight_are_limited() -> None:
    jobs = [new_job(prompt=5, answer=15, arrival=float(place)) for place in range(6)]
    scheduler = scheduler_of(jobs, max_batch=4)
    assert len(start_all(scheduler)) == 4 and len(scheduler.waiting) == 2
    scheduler.remove(jobs[1])
    assert start_all(scheduler) == [jobs[4]]
    scheduler = scheduler_of(jobs, max_in_flight=59)
    assert start_all(scheduler) == jobs[:2], "three could come to 60 tokens"
    scheduler.remove(jobs[0])
    assert start_all(scheduler) == [jobs[2]]
    batch = Batch([], [], [], [])
    scheduler._preempt(batch, jobs[2])
    assert batch.preempted == [(jobs[2], "recompute")], "nothing is swapped unless swapping was chosen"
    assert start_all(scheduler) == [jobs[2]], "it is the first in line again"


def test_some_begin_together() -> None:
    """At once while nobody runs, then when there is room for three, or for all who still wait."""
    engine = engine_of("fcfs", max_batch=4, together=3)
    lengths = (2, 3, 6, 9, 5, 5, 5, 9, 2)
    streams = engine.open_streams([Request(prompt=[1, 2], max_tokens=one, ignore_eos=True) for one in lengths])
    sizes = []
    while engine.num_requests:
        engine.step()
        sizes.append(len(engine.loop.scheduler.running) + sum(stream.result is not None for stream in streams))
    assert [stream.result is not None for stream in streams] == [True] * len(lengths)
    assert sizes[0] == 4 and sorted(set(sizes)) == [4, 7, 9], "so many have begun, in the end all of them"


def test_a_job_that_fits_does_not_overtake_one_that_does_not() -> None:
    jobs = [new_job(answer=answer, arrival=float(place)) for place, answer in enumerate([50, 50, 1])]
    scheduler = scheduler_of(jobs, max_in_flight=70)
    assert start_all(scheduler) == jobs[:1]


def test_one_that_is_larger_than_the_limit_runs_alone() -> None:
    jobs = [new_job(answer=100), new_job(answer=1)]
    scheduler = scheduler_of(jobs, max_in_flight=50)
    assert start_all(scheduler) == jobs[:1], "else it would wait for ever; the engine refuses it before"


def test_leaving_the_line_takes_no_memory() -> None:
    scheduler = scheduler_of()
    for place in range(5_000):
        job = new_job(arrival=float(place))
        scheduler.add(job)
        scheduler.remove(job)
    assert len(scheduler._queue) <= 65 and not scheduler.waiting and start_all(scheduler) == []


states = st.tuples(
    st.integers(1, 60),  # prompt
    st.integers(0, 60),  # read of it
    st.booleans(),  # decodes
    st.integers(0, 16),  # width wanted
)


@given(
    st.lists(states, min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 4),
    st.sampled_from(sorted(policies.POLICIES)),
)
def test_a_pass_keeps_to_its_budget(
    jobs: list[tuple[int, int, bool, int]], chunk: int, spare: int, room: int, policy: str
) -> None:
    """Whatever runs: chunks, decodes and drafts fit, every decoding job is in, and something of a prompt is read."""
    max_batch = len(jobs) + room
    scheduler = scheduler_of(max_batch=max_batch, prefill_chunk=chunk, step_tokens=max_batch + spare, policy=policy)
    for place, (prompt, read, decodes, width) in enumerate(jobs):
        cached = prompt if decodes else min(read, prompt - 1)
        scheduler.add(new_job(prompt, 99, arrival=float(place), said=int(decodes), cached=cached, draft=width))
    running = start_all(scheduler)
    batch = scheduler.next_batch()
    assert num_fed(batch) <= max_batch + spare and sum(batch.chunks) <= chunk
    assert {job.id for job in running if len(job.tokens) - job.cached == 1} <= {job.id for job in batch.decode}
    assert len({job.id for job in batch.jobs}) == len(batch.jobs) == len(batch.chunks) + len(batch.room)
    readers = [job for job in running if len(job.tokens) - job.cached > 1]
    if readers:
        first = min(readers, key=lambda job: scheduler.policy.order(job))
        got = dict(zip([job.id for job in batch.prefill], batch.chunks, strict=True))
        unread = len(first.tokens) - first.cached
        got.update({job.id: len(job.tokens) - job.cached for job in batch.decode})
        assert got[first.id] >= min(unread, chunk, spare), "the first prompt gets its share"
    for job, width in zip(batch.decode, batch.room, strict=True):
        assert width <= job.width and ((job, OVER_BUDGET) in batch.fallbacks) == (width < job.width)


def test_drafts_share_what_is_left_and_the_widest_give_most() -> None:
    jobs = [new_job(answer=99, said=1, cached=3, draft=width) for width in (2, 16, 5)]
    scheduler = scheduler_of(jobs, max_batch=4, step_tokens=12)
    start_all(scheduler)
    batch = scheduler.next_batch()
    assert batch.room == [2, 3, 3] and [job for job, _ in batch.fallbacks] == jobs[1:]


@pytest.mark.parametrize("length", [1, 7, 64, 301])
@pytest.mark.parametrize(("chunk", "spare"), [(16, 100), (64, 8), (512, 1)])
def test_a_prompt_is_read_in_bounded_time_beside_a_full_batch(length: int, chunk: int, spare: int) -> None:
    """ceil(n / min(prefill_chunk, budget - max_batch)) passes, and everybody decodes in each of them."""
    max_batch = 8
    decoding = [new_job(answer=900, said=1, cached=3) for _ in range(max_batch - 1)]
    scheduler = scheduler_of(decoding, max_batch=max_batch, prefill_chunk=chunk, step_tokens=max_batch + spare)
    start_all(scheduler)
    late = new_job(prompt=length, arrival=1.0)
    scheduler.add(late)
    start_all(scheduler)
    num_passes = 0
    while len(late.tokens) == length:
        lengths = [len(job.tokens) for job in decoding]
        advance(scheduler.next_batch())
        assert [len(job.tokens) for job in decoding] == [length + 1 for length in lengths], "a decode was starved"
        num_passes += 1
    assert num_passes <= math.ceil(length / min(chunk, spare))


# Through the engine


class Seen(NamedTuple):
    """Jobs in the order they had their first and their last token, by the place they were submitted at."""

    first: list[int]
    last: list[int]
    jobs: list[Job]


def engine_of(policy: Any = "fcfs", *, pages: int | None = None, drafters: Any = (), **settings: Any) -> Engine:
    clock = VirtualClock()
    target = MockBackend(MODEL, clock=clock) if pages is None else PagedMock(MODEL, Pages(pages, 4), clock=clock)
    scheduling = SchedulerConfig(policy=policy, **settings)
    return Engine(target, drafters, scheduling=scheduling, clock=clock, threaded=False)


def submit(engine: Engine, *requests: Request) -> list[Job]:
    jobs = engine._jobs(requests, {})
    engine._submit(jobs)
    return jobs


def ask(prompt: int = 4, answer: int = 6, **settings: Any) -> Request:
    return Request(prompt=[1 + place % 15 for place in range(prompt)], sampling=GREEDY, max_tokens=answer, **settings)


def serve(engine: Engine, *requests: Request) -> Seen:
    """All at once, until they are done."""
    jobs = submit(engine, *requests)
    first: list[int] = []
    last: list[int] = []
    while engine.num_requests:
        engine.step()
        for place, job in enumerate(jobs):
            if job.output and place not in first:
                first.append(place)
            if job.done and place not in last:
                last.append(place)
    assert all(job.error is None for job in jobs)
    return Seen(first, last, jobs)


def test_engine_fcfs_keeps_the_order() -> None:
    engine = engine_of("fcfs", max_batch=1)
    seen = serve(engine, ask(answer=9), ask(answer=1), ask(answer=5, priority="high"), ask(answer=2, deadline_s=99.0))
    assert seen.first == seen.last == [0, 1, 2, 3]


def test_engine_sjf_serves_the_short_first() -> None:
    engine = engine_of("sjf", max_batch=1)
    seen = serve(engine, ask(answer=9), ask(answer=1), ask(answer=5), ask(answer=2))
    assert seen.last == [1, 3, 2, 0]


def test_engine_priority_bounds_the_worst_wait() -> None:
    """One of low priority against a stream of high ones that keeps the engine busy for good."""
    waits = {}
    for ageing_s in (2.0, 5.0, 1e9):
        engine = engine_of(ByPriority(ageing_s), max_batch=1)
        low = submit(engine, ask(answer=5, priority="low"))[0]
        while low.first_token is None and engine.clock.now() < 40.0:
            while sum(not job.output for job in engine.loop.jobs.values()) < 4:
                submit(engine, ask(answer=5, priority="high"))
            engine.step()
        waits[ageing_s] = math.inf if low.first_token is None else low.first_token
    service = 5 * 0.1
    # Four wait at a time: those who came in its two levels' worth of time, and what was in line then.
    assert waits[2.0] <= 2 * 2.0 + 5 * service and 4.0 < waits[5.0] <= 2 * 5.0 + 5 * service
    assert waits[1e9] == math.inf, "without ageing it never comes to its turn"


def test_engine_edf_serves_by_deadline_and_ends_who_cannot_make_it() -> None:
    engine = engine_of("edf", max_batch=1)
    serve(engine, *[ask(answer=10) for _ in range(4)])  # it learns what a pass takes
    seen = serve(engine, ask(answer=5), ask(answer=5, deadline_s=5.0), ask(answer=5, deadline_s=2.0))
    assert seen.last == [2, 1, 0] and all(len(job.output) == 5 for job in seen.jobs)
    late = submit(engine, ask(answer=5, deadline_s=0.05))[0]
    passes = engine.loop.target.num_passes
    events = engine.step()
    assert late.finish_reason == FinishReason.DEADLINE == events[0].result.finish_reason and late.output == []
    assert engine.loop.target.num_passes == passes, "no pass for who is late after it"
    patient = submit(engine, ask(answer=5, deadline_s=0.35))[0]
    while not patient.done:
        engine.step()
    assert patient.finish_reason == FinishReason.DEADLINE and len(patient.output) == 3
    assert engine.loop.target.num_passes == passes + 3


def test_others_end_late_ones_when_they_are_late() -> None:
    engine = engine_of("fcfs", max_batch=1)
    jobs = submit(engine, ask(answer=5), ask(answer=5, deadline_s=0.25))
    while engine.num_requests:
        engine.step()
    assert [job.finish_reason for job in jobs] == [FinishReason.LENGTH, FinishReason.DEADLINE]
    assert jobs[1].output == [], "it waited until it was late, and left the line"


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_orca_never_preempts_and_the_others_do(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pages, four answers of six pages each; nothing but the room that is kept differs."""
    monkeypatch.setattr(policies, "HEADROOM", 2)
    engine = engine_of(policy, pages=10, drafters=[NgramDrafter()])
    requests = [Request(prompt=[place, 1, 2, place], sampling=GREEDY, max_tokens=20) for place in range(4)]
    seen = serve(engine, *requests)
    assert (engine.statistics.preemptions == 0) == (policy == "orca")
    alone = engine_of()
    for job, request in zip(seen.jobs, requests, strict=True):
        assert job.output == alone.generate(request).token_ids


def test_orca_keeps_room_for_resumed_requests_too(tmp_path: Path) -> None:
    requests = [Request(prompt=[place, 1, 2, place], sampling=GREEDY, max_tokens=20) for place in range(4)]
    engine = engine_of("orca", pages=24)
    jobs = submit(engine, *requests)
    for _ in range(3):
        engine.step()
    engine.snapshot(tmp_path / "engine")
    while engine.num_requests:
        engine.step()
    other = engine_of("orca", pages=14)  # room for two of them at a time
    streams = other.resume(tmp_path / "engine")
    while other.num_requests:
        other.step()
        assert len(other.loop.scheduler.running) <= 2
    assert [list(stream)[-1].result.token_ids for stream in streams] == [job.output for job in jobs]
    assert other.statistics.preemptions == 0


def test_the_first_never_gives_way_to_one_that_only_has_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second shares all its pages with the first, and the rest of the pool is promised to it: it gives way."""
    engine = engine_of(pages=8, prefill_chunk=9)
    first = submit(engine, ask(prompt=9, answer=23))[0]
    monkeypatch.setattr(policies, "HEADROOM", 1)
    while len(first.tokens) < 13:  # its next pass needs a page more
        engine.step()
    monkeypatch.setattr(policies, "HEADROOM", 19)
    second = submit(engine, ask(prompt=9, answer=19))[0]
    while engine.num_requests:
        engine.step()
        assert first.done or first.slot is not None
    assert first.statistics.preemptions == 0 < second.statistics.preemptions
    assert first.output[:19] == second.output


class Shy(Policy):
    """Ten lines: the shortest prompt first, whoever said least gives way, room for a page more."""

    name = "shy"

    def order(self, job: Job) -> tuple[float, ...]:
        return (job.num_prompt, job.arrival)

    def victim(self, candidates: Sequence[Job]) -> Job | None:
        return min(candidates, key=lambda job: len(job.output))

    def reserve(self, job: Job) -> int:
        return min(job.limit, len(job.tokens) + 4)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_policy_of_your_own(preempt: Any) -> None:
    requests = [ask(prompt=prompt, answer=20) for prompt in (9, 3, 6)]
    engine = engine_of(Shy(), max_batch=1)
    assert serve(engine, *requests).last == [1, 2, 0]
    engine = engine_of(Shy(), pages=10, preempt=preempt)
    seen, alone = serve(engine, *requests), engine_of()
    assert engine.statistics.preemptions > 0
    assert [job.output for job in seen.jobs] == [alone.generate(request).token_ids for request in requests]


def test_engine_keeps_its_limits() -> None:
    engine = engine_of(max_batch=3, max_in_flight=40, drafters=[NgramDrafter()], step_tokens=7)
    submit(engine, *[ask(prompt=4 + place, answer=8) for place in range(8)])
    fed = engine.loop.target.num_tokens_fed
    while engine.num_requests:
        engine.step()
        running = engine.loop.scheduler.running
        assert len(running) <= 3 and sum(job.limit for job in running) <= 40
        fed, before = engine.loop.target.num_tokens_fed, fed
        assert fed - before <= 7


def test_everybody_decodes_while_long_prompts_are_read() -> None:
    engine = engine_of(max_batch=6, prefill_chunk=8, step_tokens=14)
    decoding = submit(engine, *[ask(answer=60) for _ in range(3)])
    while not all(job.output for job in decoding):
        engine.step()
    reading = submit(engine, *[ask(prompt=100, answer=1) for _ in range(3)])
    for turn in range(math.ceil(300 / 8)):
        lengths = [len(job.output) for job in decoding]
        engine.step()
        assert [len(job.output) for job in decoding] == [length + 1 for length in lengths], turn
    assert all(job.done for job in reading)


# Cancelling


def test_cancel_while_waiting_and_running() -> None:
    engine = engine_of(max_batch=1)
    running, waiting, other = submit(engine, ask(answer=9), ask(answer=9), ask(answer=9))
    engine.step()
    assert engine.cancel(waiting.request_id) and engine.cancel(running.request_id)
    engine.step()
    for job, tokens in ((waiting, 0), (running, 1)):
        assert job.finish_reason == FinishReason.CANCELLED
        assert len(job.output) == tokens and not engine.cancel(job.request_id)
    while engine.num_requests:
        engine.step()
    assert other.finish_reason == FinishReason.LENGTH and engine.loop.target.num_slots == 0


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_cancel_who_gave_way(preempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "HEADROOM", 2)
    engine = engine_of(pages=10, preempt=preempt, drafters=[NgramDrafter()])
    jobs = submit(engine, *[Request(prompt=[p, 1, 2, p], sampling=GREEDY, max_tokens=30) for p in range(3)])
    while not any(job.statistics.preemptions for job in jobs):
        engine.step()
    [gone] = [job for job in jobs if job.slot is None]
    sequences, said = engine.loop.scheduler.sequences, list(gone.output)
    assert (sequences.num_swapped > 0) == (preempt == "swap") and said
    assert engine.cancel(gone.request_id)
    engine.step()
    assert gone.finish_reason == FinishReason.CANCELLED and sequences.num_swapped == 0
    while engine.num_requests:
        engine.step()
    assert gone.output == said == gone.result.token_ids and engine.loop.target.pages.usage.held == 0
    assert gone.id not in engine.loop.router.drafters["ngram"].lookups


def test_swapping_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "HEADROOM", 2)
    requests = [Request(prompt=[place, 1, 2, place], sampling=GREEDY, max_tokens=30) for place in range(4)]
    outputs = []
    for swap_tokens in (0, 12, 1000):
        engine = engine_of(pages=10, preempt="swap", swap_tokens=swap_tokens)
        jobs, most = submit(engine, *requests), 0
        while engine.num_requests:
            engine.step()
            most = max(most, engine.loop.scheduler.sequences.num_swapped)
        assert most <= swap_tokens and (most > 0) == (swap_tokens > 0)
        outputs.append([job.output for job in jobs])
    assert outputs[0] == outputs[1] == outputs[2]
