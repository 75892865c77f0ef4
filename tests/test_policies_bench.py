"""What the policies are for, on a small made-up trace in virtual time: the real engine, scheduler and pages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from outrider.bench.policies import Call, Ending, Reading, Setting, at_load, calls_of, plot, reading_of, replay
from outrider.bench.trace import COLUMNS, Arrival, made_up, read_trace, shortened, squeezed
from outrider.cli.benches import show_policies
from outrider.errors import ConfigError
from outrider.sched.policies import POLICIES, ByPriority, Policy

SETTING = Setting(load=2.0, num_requests=80, num_pages=160, max_batch=16, ageing_s=1.0)
DOCS = Path(__file__).parent.parent / "docs" / "policies.md"


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return calls_of(at_load(made_up(SETTING.num_requests), SETTING), SETTING)


@pytest.fixture(scope="module")
def patient(calls: Sequence[Call]) -> dict[str, list[Ending]]:
    policies: dict[str, str | Policy] = {name: name for name in POLICIES if name != "edf"}
    policies |= {"priority": ByPriority(SETTING.ageing_s), "no ageing": ByPriority(1e9)}
    return {name: replay(calls, policy, SETTING) for name, policy in policies.items()}


@pytest.fixture(scope="module")
def readings(patient: dict[str, list[Ending]]) -> dict[str, Reading]:
    return {name: reading_of(name, endings, SETTING.load) for name, endings in patient.items()}


def test_patient_callers_get_everything(calls: Sequence[Call], patient: dict[str, list[Ending]]) -> None:
    """Whatever the policy: the order changes, the answers do not."""
    for endings in patient.values():
        assert [ending.num_tokens for ending in endings] == [call.arrival.num_answer for call in calls]
        assert all(ending.is_complete for ending in endings)


def test_first_come_first_served(patient: dict[str, list[Ending]]) -> None:
    starts = [ending.started for ending in patient["fcfs"]]
    assert None not in starts and starts == sorted(starts, key=lambda start: start or 0.0)
    assert sum(ending.wait > 1.0 for ending in patient["fcfs"]) > 20, "without a queue there is nothing to keep"


def test_shortest_first_has_the_lowest_mean_latency(readings: dict[str, Reading]) -> None:
    means = {name: reading.latency.mean for name, reading in readings.items() if reading.latency}
    assert all(means["sjf"] < 0.9 * mean for name, mean in means.items() if name != "sjf"), means


@pytest.mark.slow
def test_earliest_deadline_misses_fewest(calls: Sequence[Call]) -> None:
    late = {
        name: reading_of(name, replay(calls, name, SETTING, patient=False), SETTING.load).num_late for name in POLICIES
    }
    assert all(late["edf"] < count for name, count in late.items() if name != "edf"), late


def test_ageing_bounds_the_worst_wait(readings: dict[str, Reading]) -> None:
    """Nobody who comes two levels' head start later goes before a call of low priority."""
    bound = readings["fcfs"].worst_wait + 2 * SETTING.ageing_s
    assert readings["priority"].worst_wait_low <= bound < readings["no ageing"].worst_wait_low


def test_orca_never_preempts(readings: dict[str, Reading]) -> None:
    assert readings["orca"].num_preemptions == 0 < readings["fcfs"].num_preemptions


def test_swapping_loses_nothing(calls: Sequence[Call]) -> None:
    endings = replay(calls, "fcfs", replace(SETTING, preempt="swap"))
    assert sum(ending.num_preemptions for ending in endings) > 0
    assert [ending.num_tokens for ending in endings] == [call.arrival.num_answer for call in calls]


def test_calls_are_the_same_every_time(calls: Sequence[Call]) -> None:
    assert calls == calls_of([call.arrival for call in calls], SETTING)
    assert {call.priority for call in calls} == {"low", "normal", "high"}


def test_load_is_work_over_time() -> None:
    """What the engine needs for all calls at once, over the time in which they arrive."""
    arrivals = at_load(made_up(20), SETTING)
    at_once = calls_of([replace(arrival, at=0.0) for arrival in arrivals], SETTING)
    busy = max(ending.ended for ending in replay(at_once, "fcfs", SETTING))
    assert busy / arrivals[-1].at == pytest.approx(SETTING.load)
    rare = calls_of(squeezed(arrivals, 10_000.0), SETTING)
    assert max(ending.wait for ending in replay(rare, "fcfs", SETTING)) == pytest.approx(0.0)


def test_traces(tmp_path: Path) -> None:
    header = ",".join(COLUMNS)
    plain, packed = tmp_path / "trace.csv", tmp_path / "trace.csv.gz"
    plain.write_text(f"{header}\n5.5,100,9\n3,17,8\n8,1,1\n")
    packed.write_bytes(gzip.compress(f"{header}\r\n2023-11-16 18:15:46.6805900,374,44\r\n".encode()))
    assert read_trace(plain) == [Arrival(0.0, 17, 8), Arrival(2.5, 100, 9), Arrival(5.0, 1, 1)]
    assert read_trace(plain, 1) == [Arrival(0.0, 100, 9)]
    assert read_trace(packed) == [Arrival(0.0, 374, 44)]
    assert shortened(read_trace(plain), 8)[1] == Arrival(2.5, 13, 2)
    assert [one.at for one in squeezed(read_trace(plain), 10.0)] == [0.0, 5.0, 10.0]
    assert made_up(50) == made_up(50) != made_up(50, seed=1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"TIMESTAMP,ContextTokens\n1,2\n", "no column GeneratedTokens"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n1,2\n", "line 3: a line is"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3\n", "line 2: a line is"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\nnan,2,3\n", "line 2: a line is"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,0\n", "line 2: a line is"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        (b"\xff\xfe\x00", "cannot read"),
        (None, "No such file"),
    ],
)
def test_wrong_traces_are_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        read_trace(path)
    assert caught.value.param == "trace"


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="load is a number above 0"):
        Setting(load=0.0)
    with pytest.raises(ConfigError, match="leave it out"):
        at_load([Arrival(0.0, 100_000, 4)], Setting())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "trace.csv", tmp_path / "policies.svg"
    trace.write_text(
        "\n".join([",".join(COLUMNS), *(f"{second},{40 + second},{8 * second + 8}" for second in range(6))])
    )
    show_policies(False, False, trace, 2.0, picture)
    out = capsys.readouterr().out
    assert "6 requests at load 2, patient callers" in out
    assert [row.split()[0].strip(",") for row in out.splitlines() if row.split()[0].strip(",") in POLICIES] == [
        *("fcfs", "sjf", "priority", "orca", "priority"),
        *("fcfs", "sjf", "priority", "edf", "orca"),
    ]
    assert len(list(ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 10 * 4
    show_policies(True, True, trace)
    assert all(json.loads(row)["num_requests"] == 6 for row in capsys.readouterr().out.splitlines())


def test_nothing_answered_can_be_shown(calls: Sequence[Call]) -> None:
    """Of calls that were all given up there are no times."""
    given_up = [Ending(calls[0], None, None, 1.0, 0, 0, False)]
    reading = reading_of("fcfs", given_up, 1.0, is_patient=False)
    assert reading.latency is None and reading.num_late == 1
    assert "<svg" in plot([reading])


def test_the_examples_in_the_docs_run() -> None:
    blocks = DOCS.read_text().split("```python\n")[1:]
    assert blocks
    for block in blocks:
        exec(compile(block.split("```")[0], str(DOCS), "exec"), {})
