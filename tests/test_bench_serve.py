"""`outrider bench serve`: arrivals, arithmetic, and small runs against our own server and a stand-in for another."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from outrider.bench.asking import Outcome, Sample
from outrider.bench.looking import base_of
from outrider.bench.serve import Target, readings
from outrider.bench.served import Promise, Run, reading_of
from outrider.bench.trace import COLUMNS, Arrival
from outrider.bench.traffic import Traffic, plan, poisson, shuffled
from outrider.bench.work import OWN
from outrider.cli.bench_serve import notes, show_serve
from outrider.errors import ConfigError, NotReadyError, OutriderError, RequestError

pytest.importorskip("httpx")
CLOSED = Traffic(kind="clients", load=2, prompts=["a", "b"], num_requests=4, max_tokens=8)


def test_poisson_arrivals() -> None:
    moments = list(islice(poisson(5.0, 0), 20_000))
    gaps = [after - before for before, after in pairwise(moments)]
    assert mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert mean(gap * gap for gap in gaps) == pytest.approx(2 * 0.2**2, rel=0.06)  # as of an exponential distribution
    assert moments == list(islice(poisson(5.0, 0), 20_000)) != list(islice(poisson(5.0, 1), 20_000))


def test_a_trace_is_scaled_in_time_and_bounds_the_answers() -> None:
    trace = [Arrival(0.0, 10, 5), Arrival(4.0, 10, 100), Arrival(10.0, 10, 7)]
    traffic = Traffic(kind="trace", load=2.0, prompts=["a"], trace=trace, max_tokens=50)
    assert [(call.at, call.max_tokens) for call in traffic.calls()] == [(0.0, 5), (2.0, 50), (5.0, 7)]
    assert replace(traffic, seconds=5.0).expected == 2 and replace(traffic, num_requests=1).expected == 1


@pytest.mark.parametrize("given", [{"clients": "3"}, {"rate": "7"}])
def test_both_modes_get_the_same_calls(given: dict[str, str]) -> None:
    (traffic,) = plan(OWN, num_requests=40, **given)
    assert list(traffic.calls()) == list(traffic.calls())
    assert len({call.prompt for call in islice(traffic.calls(), 16)}) == 16, (
        "a prompt comes again before all were asked"
    )
    assert {call.at is None for call in traffic.calls()} == {"clients" in given}


def test_prompts_come_in_another_order_every_time() -> None:
    texts = list(islice(shuffled("abcdefgh", 0), 24))
    assert all(sorted(texts[start : start + 8]) == list("abcdefgh") for start in (0, 8, 16))
    assert texts[:8] != texts[8:16]


def test_a_sweep(tmp_path: Path) -> None:
    assert [(one.kind, one.load, one.num_requests) for one in plan(OWN, clients="1,16")] == [
        ("clients", 1.0, 32),
        ("clients", 16.0, 64),
    ]
    assert [(one.load, one.num_requests) for one in plan(OWN, rate="0.5,10", seconds=3)] == [(0.5, None), (10.0, None)]
    file = tmp_path / "trace.csv"
    file.write_text(f"{','.join(COLUMNS)}\n5,10,20\n6,10,30\n")
    assert [[call.at for call in one.calls()] for one in plan(OWN, trace=file, speed="1,4")] == [[0, 1], [0, 0.25]]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"clients": "2", "rate": "1"}, "clients"),
        ({"clients": "1,many"}, "clients"),
        ({"clients": "0"}, "clients"),
        ({"rate": "-1"}, "rate"),
        ({"rate": "nan"}, "rate"),
        ({"seconds": float("inf")}, "seconds"),
        ({"num_requests": 0}, "requests"),
    ],
)
def test_plans_that_make_no_sense(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(OWN, **given)
    assert refused.value.param == param


def sample(due: float, first: float, last: float, tokens: int | None, outcome: Outcome = "ok", **more: Any) -> Sample:
    one = Sample(due, due, first, last, last, outcome, counted=tokens, chunks=3)
    for name, value in more.items():
        setattr(one, name, value)
    return one


def test_arithmetic_on_made_up_samples() -> None:
    samples = [
        sample(10.0, 10.1, 11.0, 10, rounds=5, drafted=8, accepted=4),  # 0.1 s a token
        sample(10.0, 10.3, 11.3, 11, rounds=5, drafted=2, accepted=1),
        sample(12.0, 13.5, 14.0, 6, rounds=5),  # late
        sample(12.0, 12.2, 12.2, 1, rounds=1),  # no second token
        sample(12.0, 12.1, 20.0, 5, rounds=4),  # slow
        sample(13.0, 0.0, 13.0, 0, "refused", status=429, problem="429: full"),
        sample(13.0, 0.0, 13.0, 0, "refused", status=503, problem="503: going down"),
        sample(13.0, 0.0, 13.1, 0, "error", problem="the stream ended early"),
    ]
    run = Run(begun=10.0, num_started=9, samples=samples, delays=[0.0] * 99 + [0.2])
    reading = reading_of(run, CLOSED, Promise(0.5, 0.11), mode="speculation")
    assert (reading.requests, reading.ok, reading.unfinished) == (9, 5, 1)
    assert (reading.refused, reading.errors) == ({"429": 1, "503": 1}, {"the stream ended early": 1})
    assert reading.seconds == pytest.approx(10.0) and reading.tokens == 33
    assert reading.tokens_per_second == pytest.approx(3.3) and reading.requests_per_second == pytest.approx(0.5)
    assert reading.goodput == pytest.approx(0.3)
    assert reading.ttft is not None and reading.ttft.p50 == pytest.approx(0.2)
    assert reading.ttft.p90 == pytest.approx(0.3 + 0.6 * 1.2)
    assert reading.per_token is not None and reading.per_token.p50 == pytest.approx(0.1)
    assert reading.latency is not None and reading.latency.p99 == pytest.approx(2.0 + 0.96 * 6.0)
    assert reading.acceptance == pytest.approx(0.5) and reading.tokens_per_round == pytest.approx(33 / 20)
    assert reading.tokens_from == "usage" and not reading.is_client_late
    assert reading_of(run, CLOSED, Promise()).goodput == pytest.approx(0.5)


def test_chunks_are_counted_where_nobody_counts_and_a_late_client_is_told() -> None:
    late = sample(10.0, 11.0, 12.0, None)
    late.started = 10.4
    reading = reading_of(Run(begun=10.0, num_started=1, samples=[late]), CLOSED, Promise())
    assert (reading.tokens, reading.tokens_from) == (3, "chunks")
    assert late.per_token == pytest.approx(0.5) and late.ttft == pytest.approx(1.0)
    assert reading.is_client_late and any("the numbers are its own" in note for note in notes([reading]))


def test_nothing_at_all_can_be_read() -> None:
    reading = reading_of(Run(begun=1.0), CLOSED, Promise(), is_interrupted=True)
    assert (
        reading.ttft is None and reading.tokens_per_second == 0.0 and json.dumps(asdict(reading)) and notes([reading])
    )


def test_our_own_server_plain_and_with_speculation() -> None:
    traffics = plan(OWN, clients="4", num_requests=6, max_tokens=12) + plan(
        OWN, rate="50", num_requests=5, max_tokens=12
    )
    found = list(readings(traffics, Target(model="mock-cost"), promise=Promise(60.0, 60.0), warm_up=1))
    assert [(one.kind, one.mode, one.requests, one.ok) for one in found] == [
        ("clients", "plain", 6, 6),
        ("clients", "speculation", 6, 6),
        ("rate", "plain", 5, 5),
        ("rate", "speculation", 5, 5),
    ]
    for plain, other in (found[:2], found[2:]):
        assert plain.tokens == other.tokens > 0, "greedy answers are the same"
        assert plain.acceptance is None and other.acceptance is not None and 0 < other.acceptance < 1
        assert plain.tokens_per_round == 1.0 and other.tokens_per_round is not None and other.tokens_per_round > 1.0
    for one in found:
        assert one.model == "mock-cost" and one.tokens_from == "usage" and one.is_fresh and not one.errors
        assert one.goodput == one.requests_per_second > 0
        assert one.ttft is not None and one.per_token is not None and one.latency is not None


def test_what_the_server_refuses_is_counted_by_status() -> None:
    target = Target(model="mock-cost", arguments=("--max-batch", "1", "--max-queue", "1"))
    (traffic,) = plan(OWN, rate="1000", num_requests=10, max_tokens=40)
    (reading,) = readings([traffic], target, compare=False, warm_up=3)
    assert reading.mode == "speculation" and reading.ok >= 1 and reading.ok + reading.refused["429"] == 10
    assert any("with 429" in note for note in notes([reading]))


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\r\n\r\n"


def words(text: str, end: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": end}])


OPENING = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
GOOD = OPENING + words("One") + words(" two") + words("", "stop") + b"data: [DONE]\r\n\r\n"


class StandIn(ThreadingHTTPServer):
    """Another one's server: it answers with `streams`, in turns, and counts nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.streams = [GOOD]
        self.bodies: list[dict[str, Any]] = []
        self.lists_models = self.knows_options = True
        self.key: str | None = None
        self.silent_from: int | None = None  # the request from which on nothing is said
        self.is_silent, self.may_go_on = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        if not self.server.lists_models:
            self.say(404, b"<html>Not here</html>")
        elif self.server.key not in (None, self.headers.get("Authorization")):
            self.say(401, json.dumps({"error": {"message": "no such key"}}).encode())
        else:
            self.say(200, json.dumps({"data": [{"id": "theirs", "owned_by": "them"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = len(self.server.bodies)
        self.server.bodies.append(body)
        if self.server.silent_from is not None and number >= self.server.silent_from:
            self.server.is_silent.set()
            self.server.may_go_on.wait(20)
        if "stream_options" in body and not self.server.knows_options:
            self.say(400, json.dumps({"error": "unknown field stream_options"}).encode())
        else:
            self.say(200, self.server.streams[number % len(self.server.streams)])

    def say(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def standing_in() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.may_go_on.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with standing_in() as server:
        yield server


def test_another_ones_server_is_asked_once_and_without_our_fields(stand_in: StandIn) -> None:
    traffics = plan(OWN, clients="2", num_requests=20) + plan(OWN, rate="500", num_requests=5)
    found = list(readings(traffics, Target(url=stand_in.url), warm_up=2))
    assert [(one.mode, one.model, one.ok, one.tokens, one.tokens_from) for one in found] == [
        ("as served", "theirs", 20, 40, "chunks"),
        ("as served", "theirs", 5, 10, "chunks"),
    ]
    assert found[0].acceptance is None and not found[0].is_fresh and len(stand_in.bodies) == 1 + 2 + 20 + 2 + 5
    assert {name for body in stand_in.bodies for name in body} == {
        "messages",
        "model",
        "max_tokens",
        "stream",
        "stream_options",
        "temperature",
    }
    said = "\n".join(notes(found))
    assert "chunks with text are counted" in said and "more than once" in said


def test_a_server_that_knows_no_stream_options(stand_in: StandIn) -> None:
    stand_in.knows_options = False
    (reading,) = readings(plan(OWN, num_requests=3), Target(url=stand_in.url, temperature=0.5), warm_up=0)
    assert reading.ok == 3 and "stream_options" not in stand_in.bodies[-1]
    assert sorted(body["seed"] for body in stand_in.bodies[-3:]) == [0, 1, 2]


def test_streams_that_go_wrong_are_counted(stand_in: StandIn) -> None:
    stand_in.streams = [
        GOOD,
        OPENING + words("One"),
        words("One") + event(error={"message": "out of memory"}),
        b"data: {half\n\n",
        b"<html>Welcome</html>",
        event(choices=None, usage={"completion_tokens": "many"})
        + event(choices=[1, {"delta": None}])
        + words("x", "stop"),
    ]
    (reading,) = readings(plan(OWN, clients="1", num_requests=5), Target(url=stand_in.url), warm_up=0)
    assert reading.ok == 1 and reading.errors == {
        "the stream ended early": 1,
        "out of memory": 1,
        "an event of the stream is no JSON object": 1,
        "the answer is no stream of events, as OpenAI's servers send it": 1,
    }


def refusal(target: Target) -> OutriderError:
    with pytest.raises(OutriderError) as refused:
        list(readings(plan(OWN, num_requests=1), target))
    return refused.value


def test_what_cannot_work_is_said_in_a_sentence(stand_in: StandIn) -> None:
    assert isinstance(refusal(Target(url="http://127.0.0.1:9")), NotReadyError)
    assert refusal(Target(url="localhost:8000")).param == "url"
    assert refusal(Target(url=stand_in.url, key="a b")).param == "api_key"
    stand_in.key = "Bearer open"
    assert "--api-key" in refusal(Target(url=stand_in.url)).message
    (reading,) = readings(plan(OWN, num_requests=1), Target(url=stand_in.url, key="open"))
    assert reading.ok == 1
    stand_in.lists_models = False
    assert "--model" in refusal(Target(url=stand_in.url)).message
    stand_in.streams = [b"<html>Welcome</html>"]
    error = refusal(Target(url=stand_in.url, model="mine"))
    assert isinstance(error, RequestError) and "no stream of events" in error.message


def test_where_the_paths_begin() -> None:
    assert base_of("http://here:8000/") == base_of("http://here:8000/v1/") == "http://here:8000/v1"
    assert base_of("https://there/api/openai/") == "https://there/api/openai"


def test_the_table(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    show_serve(url=stand_in.url, clients="1,2", requests=3, warm_up=1)
    table, errors = capsys.readouterr()
    assert "theirs, load in clients" in table and table.count("as served") == 2 and table.count("3/3") == 2
    assert not errors, "nobody looks at the progress"


def test_control_c_reports_what_there_is(stand_in: StandIn) -> None:
    stand_in.silent_from = 4  # one looks, three are answered
    # Tests that a shell started in the background have the signal ignored, and so would their children.
    program = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import typer
from outrider.cli.bench_serve import show_serve
try:
    show_serve(url={stand_in.url!r}, clients="2", as_json=True, warm_up=0)
except typer.Exit as end:
    raise SystemExit(end.exit_code)
"""
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert stand_in.is_silent.wait(20)
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and not errors
    reading = json.loads(told)
    assert reading["is_interrupted"] and reading["ok"] + reading["unfinished"] == reading["requests"]
    assert reading["ok"] >= 2 and reading["unfinished"] >= 1
