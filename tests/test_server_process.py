"""A server as a process: signals, snapshots, a dying engine, exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.process import ServerProcess, running_server
from outrider.engine.engine import Engine
from outrider.types import SamplingParams

httpx = pytest.importorskip("httpx")
LENGTH = 400
PROMPTS = ["The rider", "Once upon a time", "A river under the open sky", "Tell me"]


def body(number: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "seed": number,
        "max_tokens": LENGTH,
        "temperature": 1.0,
        "top_p": 1.0,
        "ignore_eos": True,
        **more,
    }


LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
HTTP = httpx.Client(timeout=60, limits=LIMITS, verify=False, trust_env=False)  # one for all threads


class Caller(threading.Thread):
    """Streams one request and keeps what it gets until the connection ends."""

    def __init__(self, url: str, number: int, **more: Any) -> None:
        super().__init__()
        self.url, self.number = url, number
        self.body = body(number, stream=True, speculation={"trace": True}, **more)
        self.id = f"call-{number}"
        self.headers = {"X-Request-Id": self.id}
        self.tokens: list[int] = []
        self.error: dict[str, Any] | None = None
        self.status = 0
        self.begun = threading.Event()

    def run(self) -> None:
        try:
            with HTTP.stream("POST", f"{self.url}/v1/completions", json=self.body, headers=self.headers) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        self.error = chunk.get("error", self.error)
                        self.tokens += [token["id"] for token in chunk.get("speculation", {}).get("tokens", [])]
                        self.begun.set()
        except httpx.HTTPError as error:
            self.error = {"message": str(error)}
        self.begun.set()


@cache
def expected(number: int) -> list[int]:
    """What the engine says when nobody interrupts it."""
    engine = Engine.load("mock-text", width=0)
    sampling = SamplingParams(temperature=1.0, seed=number)
    prompt = PROMPTS[number % len(PROMPTS)]
    return engine.generate(prompt, max_tokens=LENGTH, ignore_eos=True, sampling=sampling).token_ids


def num_open(url: str) -> int:
    page = HTTP.get(f"{url}/metrics").text
    return sum(int(count) for count in re.findall(r"^outrider_requests_(?:running|waiting) (\d+)", page, re.MULTILINE))


def wait_until_done(url: str, request_id: str, **headers: str) -> dict[str, Any]:
    for _ in range(600):
        answer = HTTP.get(f"{url}/v1/requests/{request_id}", headers=headers)
        assert answer.status_code == 200, answer.text
        if answer.json()["status"] == "done":
            return answer.json()
        time.sleep(0.05)
    raise AssertionError(f"{request_id} does not end")


def test_what_runs_at_sigterm_goes_on_at_the_next_start(tmp_path: Path) -> None:
    arguments = ("mock-cost", "--snapshot-dir", str(tmp_path / "state"), "--max-batch", "6", "--quiet")
    callers: list[Caller] = []
    with running_server(*arguments) as server:
        callers = [Caller(server.url, number) for number in range(10)]  # more than run at once: some wait in line
        waiting: dict[str, Any] = {}

        def ask_whole() -> None:
            answer = HTTP.post(f"{server.url}/v1/completions", json=body(20), headers={"X-Request-Id": "whole"})
            waiting.update(status=answer.status_code, body=answer.json())

        whole = threading.Thread(target=ask_whole)
        for thread in (*callers, whole):
            thread.start()
        until = time.monotonic() + 30
        while num_open(server.url) < 11 or not any(caller.begun.is_set() for caller in callers):
            assert time.monotonic() < until, "some ended before the last had come: the machine is too slow for this"
            time.sleep(0.02)
        assert server.end() == 0
        for thread in (*callers, whole):
            thread.join(20)
    assert (tmp_path / "state" / "requests.snapshot").stat().st_mode & 0o077 == 0
    assert waiting["status"] == 503 and "GET /v1/requests/whole" in waiting["body"]["error"]["message"]
    assert any(0 < len(caller.tokens) < LENGTH for caller in callers)
    assert all(caller.error is not None and "saved" in caller.error["message"] for caller in callers)
    with running_server(*arguments) as server:
        for caller in callers:
            found = wait_until_done(server.url, caller.id)["choices"][0]
            assert found["token_ids"] == expected(caller.number), caller.id
            assert caller.tokens == found["token_ids"][: len(caller.tokens)] and found["finish_reason"] == "length"
        assert wait_until_done(server.url, "whole")["choices"][0]["token_ids"] == expected(20)
        assert HTTP.get(f"{server.url}/v1/requests/never").status_code == 404
        # What is over can be asked for after another start, too
        assert server.end() == 0
    with running_server(*arguments) as server:
        assert HTTP.get(f"{server.url}/v1/requests/call-3").json()["choices"][0]["token_ids"] == expected(3)
        assert HTTP.get(f"{server.url}/health/ready").status_code == 200


def test_two_keys_with_one_id_go_on_apart(tmp_path: Path) -> None:
    keys = ("first", "second")
    arguments = ["mock-cost", "--snapshot-dir", str(tmp_path), "--quiet", *(f"--api-key={key}" for key in keys)]
    with running_server(*arguments) as server:
        callers = [Caller(server.url, number) for number in range(2)]
        for caller, key in zip(callers, keys, strict=True):
            caller.headers = {"X-Request-Id": "same", "Authorization": f"Bearer {key}"}
            caller.start()
        assert all(caller.begun.wait(20) for caller in callers)
        assert server.end() == 0
        for caller in callers:
            caller.join(20)
            assert caller.error is not None and "GET /v1/requests/same" in caller.error["message"]
    with running_server(*arguments) as server:
        for number, key in enumerate(keys):
            found = wait_until_done(server.url, "same", Authorization=f"Bearer {key}")
            assert found["id"] == "same" and found["choices"][0]["token_ids"] == expected(number)


def test_without_a_folder_what_runs_is_finished_first() -> None:
    with running_server("mock-cost", "--quiet") as server:
        caller = Caller(server.url, 1, max_tokens=150)
        caller.start()
        assert caller.begun.wait(20)
        server.signal(signal.SIGTERM)
        time.sleep(0.1)
        late = HTTP.post(f"{server.url}/v1/completions", json=body(2))
        assert late.status_code == 503 and late.headers["Retry-After"]
        assert HTTP.get(f"{server.url}/health/ready").status_code == 503
        assert HTTP.get(f"{server.url}/health/live").status_code == 200
        caller.join(20)
        assert caller.error is None and caller.tokens == expected(1)[:150]
        assert server.wait(20) == 0


def test_a_second_signal_does_not_wait() -> None:
    with running_server("mock-cost", "--quiet", "--drain", "300") as server:
        caller = Caller(server.url, 1, max_tokens=3000)
        caller.start()
        assert caller.begun.wait(20)
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        server.wait(20)
        assert time.monotonic() - started < 5
        caller.join(20)


DYING = """
import sys
from outrider.engine.engine import Engine
from outrider.errors import DeviceLostError
from outrider.server.run import Place, serve
from outrider.server.settings import ServerSettings

engine = Engine.load("mock-cost")
score, passes = engine.loop.target.score, 0

def faulty(*arguments):
    global passes
    passes += 1
    if passes > 30:
        raise DeviceLostError("the device is gone")
    return score(*arguments)

engine.loop.target.score = faulty
settings, say = ServerSettings(model_name="mock"), lambda url: print(f"answers at {url}", flush=True)
sys.exit(serve(engine, settings, Place(port=0), say))
"""


def test_a_lost_device_ends_all_requests_and_the_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    found = re.search(r"answers at (\S+)", process.stdout.readline())
    assert found is not None
    callers = [Caller(found[1], number) for number in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
        assert caller.error is not None and caller.error["code"] == "device_lost", caller.error
    assert process.wait(30) == 1
    said = process.stderr.read()
    assert "the engine died" in said and "the device is gone" in said
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("arguments", [(), ("--share-memory",), ("--api-key", "key")])
def test_a_start_for_all_without_memory_says_so(arguments: tuple[str, ...]) -> None:
    with running_server("mock-text", "--quiet", "--host", "0.0.0.0", *arguments) as server:
        said = server.errors()
        assert said.count("--share-memory") == (0 if arguments else 1), said


def test_wrong_usage_is_one_line() -> None:
    def said(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "outrider", "serve", *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr
        return done.stderr

    with running_server("mock-text", "--quiet") as server:
        port = server.url.rpartition(":")[2]
        assert "choose another --port" in said("mock-text", "--port", port)
    assert "fcfs" in said("mock-text", "--policy", "lottery")
    assert "4GiB" in said("mock-text", "--kv-memory", "lots")
    assert "such as" in said("nothing-by-this-name") or "there is no" in said("nothing-by-this-name")


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    with running_server("mock-cost", "--snapshot-dir", str(tmp_path), "--quiet") as server:
        caller = Caller(server.url, 1)
        caller.start()
        assert caller.begun.wait(20)
        assert server.end() == 0
        caller.join(20)
    done = subprocess.run(
        [sys.executable, "-m", "outrider", "serve", "mock", "--port", "0", "--snapshot-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "another" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_the_helper_tells_why_a_server_did_not_start() -> None:
    with pytest.raises(Exception, match="did not start"):
        ServerProcess(["no-such-model"])


@pytest.mark.parametrize("lost", [False, True])
def test_who_still_waits_when_the_time_is_over_is_told(tmp_path: Path, lost: bool) -> None:
    """After the drain, and when the snapshot cannot be written: an error in the usual shape, never a cut."""
    folder = tmp_path / "state"
    leaving = ("--snapshot-dir", str(folder)) if lost else ("--drain", "0.2")
    with running_server("mock-cost", "--quiet", *leaving) as server:
        caller = Caller(server.url, 1, max_tokens=3000)
        caller.start()
        assert caller.begun.wait(20)
        if lost:
            folder.rmdir()
        assert server.end() == (1 if lost else 0)
        caller.join(20)
    assert caller.error is not None and "ask again" in caller.error["message"]


def test_a_request_that_ends_while_the_server_goes_down_does_not_stop_the_next_start() -> None:
    from outrider.server.kept import Kept

    kept = Kept(60.0)
    note = {"id": "a", "kind": "text_completion", "tenant": "", "user": None, "created": 1, "choices": ["a"]}
    kept.restore([note], {})
    found = kept.find("a", "")
    assert found is not None and found["status"] == "done" and found["choices"][0]["finish_reason"] == "cancelled"
