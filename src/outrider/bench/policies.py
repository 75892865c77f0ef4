"""What each policy is good for: one trace of arrivals, replayed once per policy on a virtual clock.

Engine, scheduler, pages and preemption are the real ones; a pass of the mock costs what `Setting` says. The engine is
told the true lengths (`max_tokens`). Every policy runs twice: with patient callers, who wait as long as it takes and
whose times can be compared, and with callers who leave at their deadline.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from outrider.backends.paged_mock import PagedMock
from outrider.bench.trace import Arrival, made_up, shortened, squeezed
from outrider.clock import VirtualClock
from outrider.config import MockConfig, SchedulerConfig
from outrider.engine.engine import Engine
from outrider.engine.stream import Stream
from outrider.errors import ConfigError
from outrider.kv.pages import Pages
from outrider.sched.policies import POLICIES, ByPriority, Policy
from outrider.types import FinishReason, Job, Request, SamplingParams

Priority = Literal["low", "normal", "high"]

VOCABULARY = 16  # prompts of random tokens: no two begin alike
NO_AGEING = "priority, no ageing"
QUICK = 150  # requests
LOAD = 1.1
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`load` is the time the engine needs for all requests when they are there from the start, over the time in which
    they arrive: above 1 the queue grows to the end. Deadlines are `slack` times the time a request takes alone.
    """

    load: float = LOAD
    num_requests: int = 600
    factor: float = 4.0  # lengths are divided by it
    max_batch: int = 32
    prefill_chunk: int = 256
    num_pages: int = 512
    page_size: int = 16
    seconds_per_pass: float = 0.025
    seconds_per_token: float = 0.00025
    slack: tuple[float, float] = (3.0, 20.0)
    shares: tuple[float, float, float] = (0.2, 0.6, 0.2)  # of low, normal and high priority
    ageing_s: float = 10.0  # about as long as the queue: the default is for longer ones
    preempt: Literal["recompute", "swap"] = "recompute"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.load < float("inf"):
            raise ConfigError(f"load is a number above 0, got {self.load}", param="load")

    def alone(self, arrival: Arrival) -> float:
        """Seconds of a request that has the engine for itself."""
        num_passes = -(-arrival.num_prompt // self.prefill_chunk) + arrival.num_answer - 1
        num_tokens = arrival.num_prompt + arrival.num_answer - 1
        return num_passes * self.seconds_per_pass + num_tokens * self.seconds_per_token


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it is replayed; `due` is when its answer must be complete."""

    arrival: Arrival
    due: float
    priority: Priority
    prompt: list[int]


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a call; times are seconds of the clock, None where it never came to it."""

    call: Call
    started: float | None
    first_token: float | None
    ended: float
    num_tokens: int
    num_preemptions: int
    is_complete: bool

    @property
    def is_late(self) -> bool:
        return not self.is_complete or self.ended > self.call.due

    @property
    def wait(self) -> float:
        """Until it was let in, or left."""
        return (self.ended if self.started is None else self.started) - self.call.arrival.at


@dataclass(frozen=True, slots=True)
class Spread:
    """Of many seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(float(np.mean(values)), *np.quantile(values, (0.5, 0.9, 0.99)).tolist())


@dataclass(frozen=True, slots=True)
class Reading:
    """One policy on the trace. Times to first token are of those that got one, the others of complete answers."""

    policy: str
    is_patient: bool
    load: float
    num_requests: int
    num_complete: int
    num_late: int  # too late or never
    num_preemptions: int
    ttft: Spread | None
    per_token: Spread | None
    latency: Spread | None
    worst_wait: float
    worst_wait_low: float  # of low priority
    tokens_per_second: float  # of complete answers
    seconds: float  # from the first arrival to the last end


def calls_of(arrivals: Sequence[Arrival], setting: Setting) -> list[Call]:
    """Deadlines, priorities and prompts by a fixed rule."""
    draw = random.Random(setting.seed)
    kinds: tuple[Priority, ...] = ("low", "normal", "high")
    return [
        Call(
            arrival,
            arrival.at + draw.uniform(*setting.slack) * setting.alone(arrival),
            draw.choices(kinds, setting.shares)[0],
            draw.choices(range(VOCABULARY), k=arrival.num_prompt),
        )
        for arrival in arrivals
    ]


def replay(calls: Sequence[Call], policy: str | Policy, setting: Setting, *, patient: bool = True) -> list[Ending]:
    """All calls through a fresh engine; endings come in the order of the calls."""
    clock = VirtualClock()
    engine = _engine(policy, setting, clock)
    coming = deque(enumerate(calls))
    streams: dict[str, tuple[int, Stream, Job]] = {}  # of those in the engine, by request id
    endings: dict[int, Ending] = {}
    while coming or streams:
        if not streams:
            clock.sleep(max(0.0, coming[0][1].arrival.at - clock.now()))
        while coming and coming[0][1].arrival.at <= clock.now():
            number, call = coming.popleft()
            # The pass that ran meanwhile delays its start, not its deadline.
            deadline_s = None if patient else max(0.0, call.due - clock.now())
            stream = engine.stream(_request(call, deadline_s))
            streams[stream.request_id] = number, stream, engine.loop.jobs["", stream.request_id]
        for event in engine.step():
            if event.result is not None:
                number, _, job = streams.pop(event.request_id)
                endings[number] = _ending(calls[number], job, clock.now())
        if len(streams) > engine.num_requests:
            raise next(job.error for _, _, job in streams.values() if job.error is not None)
    return [endings[number] for number in range(len(calls))]


def reading_of(name: str, endings: Sequence[Ending], load: float, *, is_patient: bool = True) -> Reading:
    """The numbers of a replay."""
    complete = [ending for ending in endings if ending.is_complete]
    seconds = max(ending.ended for ending in endings) - endings[0].call.arrival.at
    return Reading(
        policy=name,
        is_patient=is_patient,
        load=load,
        num_requests=len(endings),
        num_complete=len(complete),
        num_late=sum(ending.is_late for ending in endings),
        num_preemptions=sum(ending.num_preemptions for ending in endings),
        ttft=Spread.of([one.first_token - one.call.arrival.at for one in endings if one.first_token is not None]),
        per_token=Spread.of(
            [
                (one.ended - one.first_token) / (one.num_tokens - 1)
                for one in complete
                if one.first_token is not None and one.num_tokens > 1
            ]
        ),
        latency=Spread.of([one.ended - one.call.arrival.at for one in complete]),
        worst_wait=max(one.wait for one in endings),
        worst_wait_low=max((one.wait for one in endings if one.call.priority == "low"), default=0.0),
        tokens_per_second=sum(one.num_tokens for one in complete) / seconds,
        seconds=seconds,
    )


def at_load(arrivals: Sequence[Arrival], setting: Setting) -> list[Arrival]:
    """The arrivals, shortened and squeezed until the load is the one that is wanted."""
    short = shortened(arrivals, setting.factor)
    most, room = max(one.num_prompt + one.num_answer for one in short), setting.num_pages * setting.page_size
    if most > room:
        raise ConfigError(
            f"a request of the trace comes to {most} tokens and the pool holds {room}; leave it out", param="trace"
        )
    at_once = [replace(arrival, at=0.0) for arrival in short]
    busy = max(ending.ended for ending in replay(calls_of(at_once, setting), "fcfs", setting))
    return squeezed(short, busy / setting.load)


def readings(arrivals: Sequence[Arrival] | None = None, setting: Setting | None = None) -> Iterator[Reading]:
    """Every policy with patient callers, then with callers who leave at their deadline."""
    setting = setting or Setting()
    arrivals = (arrivals or made_up(setting.num_requests))[: setting.num_requests]
    calls = calls_of(at_load(arrivals, setting), setting)
    for patient in (True, False):
        for name, policy in _contenders(setting, patient).items():
            endings = replay(calls, policy, setting, patient=patient)
            yield reading_of(name, endings, setting.load, is_patient=patient)


def _contenders(setting: Setting, patient: bool) -> Mapping[str, Policy]:
    policies: dict[str, Policy] = {name: kind() for name, kind in POLICIES.items()}
    policies["priority"] = ByPriority(setting.ageing_s)
    if patient:
        del policies["edf"]  # without deadlines it is fcfs
        policies[NO_AGEING] = ByPriority(ageing_s=1e9)
    return policies


def _engine(policy: str | Policy, setting: Setting, clock: VirtualClock) -> Engine:
    mock = MockConfig(
        vocab_size=VOCABULARY,
        num_contexts=61,
        context=1 << 20,  # the pool is the limit
        seconds_per_pass=setting.seconds_per_pass,
        seconds_per_token=setting.seconds_per_token,
    )
    scheduling = SchedulerConfig(
        max_batch=setting.max_batch, prefill_chunk=setting.prefill_chunk, policy=policy, preempt=setting.preempt
    )
    target = PagedMock(mock, Pages(setting.num_pages, setting.page_size), clock=clock)
    return Engine(target, scheduling=scheduling, clock=clock, threaded=False)


def _request(call: Call, deadline_s: float | None) -> Request:
    return Request(
        prompt=call.prompt,
        sampling=GREEDY,
        max_tokens=call.arrival.num_answer,
        ignore_eos=True,
        priority=call.priority,
        deadline_s=deadline_s,
    )


def _ending(call: Call, job: Job, now: float) -> Ending:
    return Ending(
        call=call,
        started=job.started,
        first_token=job.first_token,
        ended=now,
        num_tokens=len(job.output),
        num_preemptions=job.statistics.preemptions,
        is_complete=job.finish_reason is FinishReason.LENGTH,
    )


def heading(reading: Reading) -> str:
    """What stands above the `line`s of readings like this one."""
    groups = "".join(f"{name:>28}" for name in ("first token, s", "per token, ms", "whole answer, s"))
    spreads = "".join(f"{name:>7}" for name in ("mean", "p50", "p90", "p99") * 3)
    counts = f"{'late':>6}{'worst wait':>12}{'of low':>8}{'tokens/s':>10}{'preempted':>11}"
    title = f"{reading.num_requests} requests at load {reading.load:g}, {_callers(reading)}"
    return f"{title}\n{'':<20}{groups}\n{'policy':<20}{spreads}{counts}"


def line(reading: Reading) -> str:
    """The reading as a line of a table."""
    spreads = "".join(
        "".join(f"{value * unit:>7.{digits}f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99))
        if spread
        else f"{'-':>7}" * 4
        for spread, unit, digits in ((reading.ttft, 1, 2), (reading.per_token, 1000, 0), (reading.latency, 1, 2))
    )
    waits = f"{reading.worst_wait:>12.1f}{reading.worst_wait_low:>8.1f}"
    counts = f"{reading.num_late:>6}{waits}{reading.tokens_per_second:>10.0f}{reading.num_preemptions:>11}"
    return f"{reading.policy:<20}{spreads}{counts}"


def plot(taken: Sequence[Reading]) -> str:
    """Bars as SVG, readable on light and dark pages: a row of panels for either kind of callers."""
    parts, top = [], 0
    for patient in (True, False):
        rows = [reading for reading in taken if reading.is_patient is patient]
        if not rows:
            continue
        parts.append(f'<text x="12" y="{top + 26}" class="title">{_callers(rows[0])}, load {rows[0].load:g}</text>')
        for number, reading in enumerate(rows):
            parts.append(f'<text x="142" y="{top + 71 + 22 * number}" class="right">{reading.policy}</text>')
        for column, (name, values) in enumerate(_panels(rows)):
            parts += _panel(150 + 178 * column, top + 48, name, values)
        top += 74 + 22 * len(rows)
    return SVG.format(width=150 + 178 * 4 + 8, height=top, parts="\n".join(parts))


def _callers(reading: Reading) -> str:
    return "patient callers" if reading.is_patient else "callers who leave at their deadline"


def _panels(rows: Sequence[Reading]) -> Iterator[tuple[str, list[tuple[float, str]]]]:
    """Name of each panel, and a value with its label for every row."""
    for name in ("p50", "p90", "p99"):
        values = [0.0 if one.ttft is None else getattr(one.ttft, name) for one in rows]
        yield f"first token, {name}", [(value, f"{value:.{2 if value < 1 else 1}f} s") for value in values]
    shares = [one.num_late / one.num_requests for one in rows]
    yield "deadline missed", [(share, f"{share:.1%}") for share in shares]


def _panel(left: int, top: int, name: str, values: Sequence[tuple[float, str]]) -> list[str]:
    parts = [f'<text x="{left}" y="{top}">{name}</text>']
    most = max([value for value, _ in values]) or 1.0
    for number, (value, label) in enumerate(values):
        width, y = max(1.0, 112 * value / most), top + 10 + 22 * number
        parts.append(f'<rect class="bar" x="{left}" y="{y}" width="{width:.1f}" height="16" rx="2"/>')
        parts.append(f'<text x="{left + width + 6:.1f}" y="{y + 13}" class="value">{label}</text>')
    return parts


SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
 role="img" aria-label="Time to first token and deadlines missed, by policy">
<style>
text {{ font: 12px system-ui, sans-serif; fill: #3d444d }} .title {{ font-weight: 600; font-size: 14px; fill: #1f2328 }}
.right {{ text-anchor: end }} .value {{ font-size: 11px }} .page {{ fill: #ffffff }} .bar {{ fill: #2f6fb0 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #b7bdc8 }} .title {{ fill: #f0f6fc }} .page {{ fill: #0d1117 }} .bar {{ fill: #6cb0f0 }} }}
</style>
<rect class="page" width="{width}" height="{height}"/>
{parts}
</svg>
"""
