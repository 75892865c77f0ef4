"""Snapshots: an answer that was stopped on the disk ends as if it had never stopped, or a clear error says why not."""

from __future__ import annotations

import json
import logging
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.backends.mock import MockBackend, mock_tokenizer
from outrider.cli.main import main
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.engine import statefile
from outrider.engine.engine import Engine
from outrider.engine.snapshot import Snapshot
from outrider.engine.statefile import read_state, write_state
from outrider.errors import NotReadyError, RequestError, SnapshotError
from outrider.types import FinishReason, Result

from tiny import save_folder, save_gguf, tiny

TARGET = MockConfig(vocab_size=32, seed=7, sharpness=2.0)
DRAFT = MockConfig(vocab_size=32, seed=7, sharpness=2.0, drift=0.5)
PROMPT = [12, 13, 14, 12, 13]
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "model": {"draft": "model", "width": 4},
    "tree": {"draft": "model", "width": 6, "tree": True},
    "auto": {"draft": "model"},
    "ngram": {"draft": "ngram", "width": 3},
    "suffix": {"draft": "suffix", "width": 3},
    "in turn": {"draft": ["suffix", "model"], "width": 3},
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1, "accept": "rejection"}  # the seed decides nothing
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "coupled": {"seed": 5, "temperature": 0.9},
    "penalties": {"seed": 5, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "greedy penalties": {**GREEDY, "frequency_penalty": 0.7, "logit_bias": {3: 1.0, 4: float("-inf")}},
}


def mocked(target: MockConfig = TARGET, draft: Any = None, *, threaded: bool = False, **options: Any) -> Engine:
    drafts = [MockBackend(DRAFT) if one == "model" else one for one in (draft if isinstance(draft, list) else [draft])]
    tokenizer = mock_tokenizer(target.vocab_size)
    return Engine.load(
        MockBackend(target),
        draft=None if draft is None else drafts,
        tokenizer=tokenizer,
        threaded=threaded,
        **options,
    )


def cut(
    make: Callable[[], Engine], prompts: Sequence[Any], settings: Sequence[dict[str, Any]], steps: int, path: Path
) -> list[Result]:
    """The answers when everything stops after some steps and goes on in another engine."""
    with make() as engine:
        streams = [engine.stream(prompt, **one) for prompt, one in zip(prompts, settings, strict=True)]
        for _ in range(steps):
            engine.step()
        assert engine.snapshot(path) == engine.num_requests == len(streams), "some ended before the cut"
        engine.close()
    with make() as engine:
        return [rest(stream) for stream in engine.resume(path)]


def rest(stream: Any) -> Result:
    result = [*stream][-1].result
    assert result is not None
    return result


def same(one: Result, other: Result) -> bool:
    """Everything a caller sees of an answer, apart from the way it was made."""
    names = "request_id text token_ids finish_reason num_prompt_tokens seed rule".split()  # noqa: SIM905
    return all(getattr(one, name) == getattr(other, name) for name in names)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.snapshot"


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("method", METHODS)
def test_going_on_is_never_having_stopped(method: str, sampling: str, path: Path) -> None:
    settings = {**SAMPLING[sampling], "max_tokens": 40, "request_id": "one"}
    whole = mocked(**METHODS[method]).generate(PROMPT, **settings)
    for steps in (0, 1, 5):
        resumed = cut(lambda: mocked(**METHODS[method]), [PROMPT], [settings], steps, path)[0]
        assert same(resumed, whole)
        counts = resumed.statistics
        assert counts.tokens == 40 and counts.drafted == counts.accepted + counts.rejected + counts.unread
        if METHODS[method].get("width"):  # not what a measured time decides
            assert counts.rounds == whole.statistics.rounds or "suffix" in method or method == "in turn"


def test_a_batch_goes_on_with_those_that_wait(path: Path) -> None:
    options = {"draft": "model", "width": 4, "max_batch": 3, "prefill_chunk": 4}
    prompts: list[Any] = [PROMPT, " the rider rode", [3] * 11, PROMPT * 3, [1, 2], " rain"]
    settings: list[dict[str, Any]] = [
        {"max_tokens": 30 + index, "seed": index, "request_id": f"number {index}", "tenant": "t" * index}
        for index in range(len(prompts))
    ]
    settings[3] = {**GREEDY, "max_tokens": 33, "request_id": "greedy"}
    whole = [mocked().generate(prompt, **one) for prompt, one in zip(prompts, settings, strict=True)]
    for steps in (1, 3, 6):
        resumed = cut(lambda: mocked(**options), prompts, settings, steps, path)
        assert all(same(one, other) for one, other in zip(resumed, whole, strict=True))


def test_a_stop_string_is_found_across_the_cut(path: Path) -> None:
    settings = {"max_tokens": 40, "seed": 2, "request_id": "one"}
    free = mocked().generate(PROMPT, **settings)
    shown = "".join(mock_tokenizer(32).token_bytes(token).decode("utf-8", "replace") for token in free.token_ids[:6])
    following = free.text[len(shown) :]
    settings["stop"] = [shown[-2:] + following[:3]]  # the first two letters are held back when it is cut
    whole = mocked().generate(PROMPT, **settings)
    assert whole.finish_reason == FinishReason.STOP and whole.text == shown[:-2]
    assert same(cut(mocked, [PROMPT], [settings], 6, path)[0], whole)


def test_half_a_character_is_whole_after_the_cut(path: Path) -> None:
    settings = {**GREEDY, "max_tokens": 8, "logit_bias": {8: 90.0, 9: 80.0}, "frequency_penalty": 100.0}
    settings["request_id"] = "one"
    whole = mocked().generate(PROMPT, **settings)
    assert "é" in whole.text
    for steps in range(1, 5):
        assert same(cut(mocked, [PROMPT], [settings], steps, path)[0], whole)


def test_the_streams_yield_what_is_left(path: Path) -> None:
    engine = mocked()
    stream = engine.stream(" the rider", max_tokens=12, seed=1)
    before = [next(stream) for _ in range(5)]
    assert engine.snapshot(path) == 1
    goes_on = [*stream]  # the request went on running here
    after = [*mocked().resume(path)[0]]
    assert [event.tokens for event in after] == [event.tokens for event in goes_on]
    result = after[-1].result
    assert result is not None and result.text == "".join(event.text for event in before + after)
    assert result.statistics.rounds == 12


def test_what_the_target_held_is_not_read_again(path: Path) -> None:
    engine = mocked()
    stream = engine.stream([5] * 100, max_tokens=20, seed=1)
    for _ in range(10):
        next(stream)
    engine.snapshot(path)
    other = mocked()
    rest(other.resume(path)[0])
    assert isinstance(other.loop.target, MockBackend) and other.loop.target.num_tokens_fed <= 11


def test_a_snapshot_of_a_request_that_was_resumed_and_still_waits(path: Path) -> None:
    engine = mocked()
    stream = engine.stream(PROMPT, max_tokens=20, seed=1)
    next(stream)
    engine.snapshot(path)
    other = mocked()
    waiting = other.resume(path)
    assert other.snapshot(path) == 1  # before a step
    del waiting
    assert rest(mocked().resume(path)[0]).token_ids == rest(stream).token_ids


def test_some_of_the_requests(path: Path) -> None:
    engine = mocked()
    streams = [engine.stream(PROMPT, max_tokens=9, seed=index, request_id=str(index)) for index in range(3)]
    engine.step()
    assert engine.snapshot(path, ["2", "0"]) == 2
    engine.cancel("0")
    assert [stream.request_id for stream in mocked().resume(path)] == ["2", "0"]
    assert engine.snapshot(path) == 2
    with pytest.raises(RequestError, match="there is no request 'x' in flight; leave it out"):
        engine.snapshot(path, ["x"])
    del streams
    assert engine.snapshot(path) == 0 and mocked().resume(path) == []


def test_deadlines_keep_what_is_left_of_them(path: Path) -> None:
    def make() -> Engine:
        clock = VirtualClock()
        target = MockConfig(vocab_size=32, seed=7, seconds_per_pass=1.0)
        return Engine.load(MockBackend(target, clock=clock), clock=clock, threaded=False)

    for steps in (0, 2):
        result = cut(make, [PROMPT], [{"max_tokens": 50, "seed": 1, "deadline_s": 6.5}], steps, path)[0]
        assert result.finish_reason == FinishReason.DEADLINE and 5 <= len(result.token_ids) <= 7


def test_snapshots_while_others_drive(path: Path) -> None:
    """Between steps, from another thread: each is a point the answer really went through."""
    settings = {"max_tokens": 400, "seed": 3, "request_id": "one", "width": 2}
    engine = mocked(draft="model", threaded=True)
    whole: list[Result] = []
    thread = threading.Thread(target=lambda: whole.append(engine.generate(PROMPT, **settings)))
    thread.start()
    lengths: list[int] = []
    while len(lengths) < 5 and thread.is_alive():
        if engine.snapshot(path):
            lengths.append(len(Snapshot.read(path).requests[0]["tokens"]))
            last = path.read_bytes()
    thread.join()
    assert lengths and lengths == sorted(lengths)
    path.write_bytes(last)
    assert same(rest(mocked(draft="model").resume(path)[0]), whole[0])


def test_a_draft_that_is_not_here_is_left_out(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"max_tokens": 20, "seed": 3, "request_id": "one"}
    whole = mocked().generate(PROMPT, **settings)
    engine = mocked(draft="model", width=3)
    stream = engine.stream(PROMPT, **settings, method="model")
    next(stream)
    engine.snapshot(path)
    with caplog.at_level(logging.WARNING):
        plain = rest(mocked().resume(path)[0])
    assert same(plain, whole) and "one: the model draft was not loaded on resume" in caplog.text
    assert plain.statistics.fallbacks == {"the model draft was not loaded on resume": 1}
    asked = rest(mocked(draft="ngram").resume(path)[0])  # it asked for the model, so nothing else drafts
    assert same(asked, whole) and "ngram" not in asked.statistics.drafters
    engine = mocked(draft="model", width=3)
    stream = engine.stream(PROMPT, **settings)
    next(stream)
    engine.snapshot(path)
    other = mocked(draft="ngram").resume(path)[0]
    assert same(rest(other), whole)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "mamba"):
        save_gguf(tiny(family), folder / f"{family}.gguf", tokenizer=True)
    save_folder(tiny("llama"), folder / "llama")
    return folder


@pytest.mark.parametrize("draft", [None, "suffix", "model"])
@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_tiny_models(family: str, draft: str | None, models: Path, path: Path) -> None:
    model = models / f"{family}.gguf"
    options: dict[str, Any] = {"context": 128, "draft": model if draft == "model" else draft, "threaded": False}
    prompts = [" the hen", [7, 8, 9] * 9]
    settings: list[dict[str, Any]] = [
        {**GREEDY, "max_tokens": 30, "ignore_eos": True, "request_id": "a"},
        {"max_tokens": 30, "ignore_eos": True, "seed": 4, "frequency_penalty": 0.5, "request_id": "b"},
    ]
    if draft is not None:
        settings = [{**one, "width": 3} for one in settings]
    with Engine.load(model, **options) as engine:
        whole = [engine.generate(prompt, **one) for prompt, one in zip(prompts, settings, strict=True)]
    resumed = cut(lambda: Engine.load(model, **options), prompts, settings, 3, path)
    assert all(same(one, other) for one, other in zip(resumed, whole, strict=True))


def test_transformers_models(models: Path, path: Path) -> None:
    settings = {**GREEDY, "max_tokens": 20, "request_id": "a"}
    options: dict[str, Any] = {"backend": "hf", "threaded": False}
    whole = Engine.load(models / "llama", **options).generate([3, 4, 5], **settings)
    resumed = cut(lambda: Engine.load(models / "llama", **options), [[3, 4, 5]], [settings], 4, path)
    assert same(resumed[0], whole)


def saved(path: Path, **settings: Any) -> bytes:
    """The bytes of a snapshot of one answer."""
    engine = mocked()
    stream = engine.stream(PROMPT, **{"max_tokens": 20, "seed": 1, **settings})
    next(stream)
    engine.snapshot(path)
    return path.read_bytes()


def test_another_model_or_architecture_is_refused(path: Path, models: Path) -> None:
    saved(path)
    engine = mocked(MockConfig(vocab_size=32, seed=8, sharpness=2.0))
    with pytest.raises(
        SnapshotError, match="another model: mock-7, whose weights are not those of the mock-8"
    ) as caught:
        engine.resume(path)
    assert caught.value.code == "invalid_snapshot" and "load the model it was saved with" in str(caught.value)
    with pytest.raises(
        SnapshotError, match=r"another architecture: mock-7 .*32 tokens.; this engine runs mock-7 .*40 tok"
    ):
        mocked(MockConfig(vocab_size=40, seed=7, sharpness=2.0)).resume(path)
    assert engine.num_requests == 0
    llama, mamba = (Engine.load(models / f"{family}.gguf", threaded=False) for family in ("llama", "mamba"))
    stream = llama.stream([3, 4], max_tokens=5)
    next(stream)
    llama.snapshot(path)
    with pytest.raises(SnapshotError, match="another architecture"):
        mamba.resume(path)
    target: Any = llama.loop.target
    stream.close()
    before = getattr(target, "fingerprint", None)
    assert rest(llama.resume(path)[0])
    stream = llama.stream([3, 4], max_tokens=5)
    next(stream)
    llama.snapshot(path)
    stream.close()
    try:
        target.fingerprint = "other weights"
    except AttributeError:
        return  # it computes one
    with pytest.raises(SnapshotError, match="whose weights are not those"):
        llama.resume(path)
    target.fingerprint = before


def test_a_fingerprint_decides_and_not_the_name(path: Path) -> None:
    """A model that was moved or renamed is the same one; another way to run it reads the tokens again."""

    class Renamed(MockBackend):
        fingerprint = "f"

    class Elsewhere(Renamed):
        pass

    def engine(kind: type[MockBackend], name: str) -> Engine:
        target = kind(TARGET)
        object.__setattr__(target.info, "name", name)
        return Engine.load(target, tokenizer=mock_tokenizer(32), threaded=False)

    first = engine(Renamed, "a")
    stream = first.stream(PROMPT, max_tokens=20, seed=1)
    next(stream)
    first.snapshot(path)
    whole = rest(stream)
    assert same(rest(engine(Renamed, "b").resume(path)[0]), whole)
    assert same(rest(engine(Elsewhere, "b").resume(path)[0]), whole)


def test_every_damaged_byte_is_seen(path: Path) -> None:
    data = saved(path, stop=["no such text"])
    dice = random.Random(1)
    for at in [*range(24), *dice.sample(range(len(data)), 200), len(data) - 1]:
        path.write_bytes(data[:at] + bytes([data[at] ^ dice.randrange(1, 256)]) + data[at + 1 :])
        with pytest.raises(SnapshotError, match="damaged"):
            read_state(path)
    for length in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(SnapshotError, match="damaged"):
            read_state(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(SnapshotError, match="damaged"):
        mocked().resume(path)
    path.write_bytes(data)
    read_state(path)


def test_files_that_are_no_snapshots(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mocked()
    with pytest.raises(SnapshotError, match=r"there is no file .*state\.snapshot; name one that"):
        engine.resume(path)
    with pytest.raises(SnapshotError, match="cannot read"):
        engine.resume(path.parent)
    for content in (b"", b"hello", b"\xff" * 100, b"GGUF" + b"\0" * 1000):
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match="is not a snapshot"):
            engine.resume(path)
    save_file({"a": np.zeros(3)}, path)
    with pytest.raises(SnapshotError, match="is not a snapshot"):
        engine.resume(path)
    monkeypatch.setattr(statefile, "VERSION", 2)
    monkeypatch.setattr(statefile, "__version__", "9.0")
    saved(path)
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match=r"written by a newer outrider \(9.0, this is .*; update outrider"):
        engine.resume(path)
    assert engine.num_requests == 0


def test_what_cannot_be_saved_or_resumed(path: Path) -> None:
    engine = mocked()
    stream = engine.stream(PROMPT, max_tokens=9, seed=1, request_id="odd", processors=[lambda tokens, row: row])
    with pytest.raises(SnapshotError, match="odd has processors, which are code and cannot be saved") as caught:
        engine.snapshot(path)
    assert caught.value.param == "processors" and not path.exists()
    stream.close()

    faults: list[Exception] = []

    def callback(token: int, text: str) -> None:
        try:
            engine.snapshot(path)
        except SnapshotError as error:
            faults.append(error)

    engine.generate(PROMPT, max_tokens=1, on_token=callback)
    assert "a callback cannot take a snapshot" in str(faults[0]) and not path.exists()
    stream = engine.stream(PROMPT, max_tokens=9, seed=1, request_id="mine", on_token=lambda token, text: None)
    with pytest.raises(SnapshotError, match=r"cannot write .*No such file or directory"):
        engine.snapshot(path / "no" / "folder")
    engine.snapshot(path)
    with pytest.raises(RequestError, match="request_id 'mine' is in use; wait for that request to end, or cancel it"):
        engine.resume(path)
    assert engine.num_requests == 1
    with pytest.raises(SnapshotError, match="mine does not fit this engine: it may grow to 14 tokens and the context"):
        mocked(MockConfig(vocab_size=32, seed=7, sharpness=2.0, context=13)).resume(path)
    closed = mocked()
    closed.close()
    with pytest.raises(NotReadyError):
        closed.resume(path)
    assert rest(mocked().resume(path)[0]).token_ids == rest(stream).token_ids


def test_a_setting_of_another_version_is_told(path: Path) -> None:
    saved(path)
    taken = Snapshot.read(path)
    taken.requests[0]["request"]["colour"] = "green"
    taken.write()
    with pytest.raises(SnapshotError, match=r"settings this outrider does not know .*colour"):
        mocked().resume(path)


def test_a_request_of_another_version_goes_on_without_what_that_counted(path: Path) -> None:
    saved(path)
    taken = Snapshot.read(path)
    taken.requests[0]["statistics"]["rounds"] = 3
    taken.write()
    assert rest(mocked().resume(path)[0]).statistics.tokens > 1


def test_only_the_owner_reads_it_and_a_failed_write_leaves_the_old(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        data = saved(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SnapshotError, match="No space left on device"):
        saved(path)
    assert path.read_bytes() == data and [*path.parent.iterdir()] == [path]


def test_data_comes_back_as_it_was(path: Path) -> None:
    content: dict[str, Any] = {
        "plain": [None, True, -3, 2**63 + 1, 0.1, 'text \ud800 é "digest":"0"', (), (1, (2,)), {"a": {}}],
        "floats": [float("inf"), float("-inf")],
        "keys": {1: "a", "$x": 2, (1, 2): 3},
        "empty": {},
        "set": frozenset({1, 2}),
        "numpy": [np.int32(4), np.float64(0.5), np.bool_(True)],
    }
    kinds = ("float64", "float32", "float16", "int64", "int8", "uint16", "bool")
    arrays = [np.arange(6).reshape(2, 3).astype(kind) for kind in kinds]
    arrays += [arrays[0].T, arrays[1][:, ::2], np.array(2.5), np.zeros((0, 3)), arrays[3].astype(">i8")]
    write_state(path, {**content, "arrays": arrays})
    back = read_state(path)
    for one, other in zip(back.pop("arrays"), arrays, strict=True):
        assert np.array_equal(one, other) and one.shape == other.shape and one.flags.writeable
        assert one.dtype == other.dtype.newbyteorder("=")
    assert back == content
    for odd in (object(), b"bytes", np.array(["text"]), np.array([None])):
        with pytest.raises(SnapshotError, match=r"content.a.0 is .*which cannot be saved"):
            write_state(path, {"a": [odd]})
    assert read_state(path)["set"] == {1, 2}


KILLED = """
import os, random, signal, sys, time
import numpy as np
from outrider import Engine
from outrider.engine.snapshot import Snapshot

path, kills = sys.argv[1], int(sys.argv[2])
engine = Engine.load("mock", threaded=False)
streams = [engine.stream(" the rider", max_tokens=4000, seed=seed) for seed in range(3)]
dice, seen = random.Random(0), set()
started = time.perf_counter()
for _ in range(3):
    engine.snapshot(path, notes={"filler": np.zeros(300_000), "number": 0})
lately = time.perf_counter() - started
for kill in range(kills):
    child = os.fork()
    if child == 0:
        for number in range(1, 100_000):
            engine.step()
            engine.snapshot(path, notes={"filler": np.full(300_000, float(number)), "number": number})
    time.sleep(dice.uniform(0.0, lately))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    taken = Snapshot.read(path)
    assert len(taken.requests) == 3 and (taken.notes["filler"] == taken.notes["number"]).all()
    seen.add((taken.notes["number"], len(taken.requests[0]["tokens"])))
left = [name for name in os.listdir(os.path.dirname(path)) if name.endswith(".part")]
print(len(left), len(seen))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_a_file_that_can_be_read(kills: int, path: Path) -> None:
    out = subprocess.check_output([sys.executable, "-c", KILLED, str(path), str(kills)], text=True)
    hit, seen = map(int, out.split())  # writers that were killed in the middle, and different files they left
    assert kills < 200 or (hit and seen > 1), "nobody was killed at a bad moment"
    resumed = Engine.load("mock", threaded=False).resume(path)
    assert [stream.request_id for stream in resumed] == ["request-1", "request-2", "request-3"]


class Run(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """A command as it is typed, in this process."""

    def run(*arguments: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Run(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def test_the_commands(path: Path, outrider: Callable[..., Run]) -> None:
    asked = ("generate", "--model", "mock", " the rider", "--seed", 3, "--max-tokens", 30)
    wanted = json.loads(outrider(*asked, "--json").out)
    part = outrider(*asked, "--save-after", 5, path)
    assert part.code == 0 and f"saved: outrider resume {path} goes on" in part.err and "finish saved" in part.err
    assert wanted["text"].startswith(part.out.removesuffix("\n"))
    got = json.loads(outrider("resume", path, "--json").out)
    for name in ("text", "token_ids", "finish_reason", "usage", "seed", "accept"):
        assert got[name] == wanted[name]
    shown = outrider("resume", path, "--draft", "none")
    assert shown.out == wanted["text"] + "\n" and "fallback (1x): the model draft was not loaded on resume" in shown.err
    missing = outrider("resume", path.with_name("nothing"))
    assert missing.code == 1 and missing.err.startswith("outrider: there is no file")
    assert outrider(*asked, "--save-after", 0, path).code == 2
    path.unlink()
    short = outrider(*asked, "--save-after", 31, path)
    assert short.code == 0 and "nothing was written" in short.err and not path.exists()


def test_commands_with_a_model_file(
    models: Path, path: Path, outrider: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is found from another folder, too; a file of an engine does not say where its model was."""
    asked = ("generate", "--model", "llama.gguf", "the hen", "--temperature", 0, "--max-tokens", 20, "--json")
    monkeypatch.chdir(models)
    whole = json.loads(outrider(*asked).out)
    part = json.loads(outrider(*asked, "--save-after", 5, path).out)
    assert part["finish_reason"] == "saved" and 5 <= len(part["token_ids"]) < 20
    monkeypatch.chdir(path.parent)
    resumed = json.loads(outrider("resume", path, "--json").out)
    assert resumed["token_ids"] == whole["token_ids"] and resumed["text"] == whole["text"]
    saved(path)
    assert "does not say where its model came from; name it with --model" in outrider("resume", path).err


def test_a_file_of_several_answers(path: Path, outrider: Callable[..., Run]) -> None:
    engine = Engine.load("mock", threaded=False)
    streams = [engine.stream(" the rider", max_tokens=number, seed=number) for number in (12, 7)]
    for _ in range(2):
        engine.step()
    engine.snapshot(path)
    texts = [rest(stream).text for stream in streams]
    assert outrider("resume", path, "--model", "mock").out == "".join(f"{text}\n" for text in texts)
