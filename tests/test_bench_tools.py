"""Kernels, simulator and tune: their arithmetic and their messages. What they measure is the commands' business."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.backends.mock import MockBackend
from outrider.bench import ahead, kernels, lookups, overhead, passes, passes_peer, simulate, tune
from outrider.cli import settings_file
from outrider.config import MockConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, OutriderError


def outrider(*arguments: str, patience_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience_s)


@pytest.mark.parametrize(
    ("width", "cost", "needed"),
    [(1, 1.5, 0.5), (1, 1.0, 0.0), (3, 4.0, None), (3, 9.0, None), (2, 1.75, 0.5), (4, 3.3616, 0.8)],
)
def test_the_acceptance_that_pays(width: int, cost: float, needed: float | None) -> None:
    found = kernels.needed_acceptance(width, cost)
    assert found == (None if needed is None else pytest.approx(needed, abs=1e-6))


def test_a_curve_leaves_the_model_as_it_was() -> None:
    target = MockBackend(MockConfig(vocab_size=16))
    seconds = kernels.curve(target, (1, 4), 20, repeats=3)
    assert {rows: len(times) for rows, times in seconds.items()} == {1: 3, 4: 3}
    assert target.num_slots == 0 and target.num_passes == 1 + 2 * 4


def test_limits_of_memory_and_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "READ_BYTES", 2**20)
    assert kernels.memory_bandwidth(2) > 0
    limits = kernels.Limits(bandwidth=1e9, weight_bytes=10**6, flops=1e9, flops_per_row=5e5)
    assert [limits.seconds(rows) for rows in (1, 4)] == [1e-3, 2e-3]
    assert kernels.Limits(1e9, 10**6).seconds(64) == 1e-3
    assert kernels.measured_limits(MockBackend(MockConfig(vocab_size=16))) is None


class FakePasses:
    """Takes as long as it is told, and may fail at some task."""

    kinds = ("pass", "decode")

    def __init__(self, name: str, seconds: float, fails_at: int = 99) -> None:
        self.name, self._seconds, self._left = name, seconds, fails_at

    def seconds(self, task: passes.Task) -> float:
        self._left -= 1
        if self._left < 0:
            raise OutriderError("gone")
        return self._seconds * task.rows


def test_passes_side_by_side() -> None:
    tasks = [passes.Task("1 row behind 64 tokens", "pass", (0,) * 65, 1), passes.Task("p", "prefill", (0,), 1)]
    tasks.append(passes.Task("4 rows behind 64 tokens", "pass", (0,) * 68, 4))
    told: list[str] = []
    engines = [FakePasses("outrider", 0.002), FakePasses("llama-cpp", 0.005), FakePasses("broken", 0.002, fails_at=3)]
    rows = passes.measure(engines, tasks, 2, told.append, settle=lambda _: None)
    assert [(row.engine, row.task[0], row.ms, row.ratio) for row in rows] == [
        *(("outrider", "1", 2.0, 1.0), ("llama-cpp", "1", 5.0, 2.5), ("broken", "1", 2.0, 1.0)),
        *(("outrider", "4", 8.0, 1.0), ("llama-cpp", "4", 20.0, 2.5)),
    ]
    assert "broken takes no further part: gone" in told
    report = passes.Report(rows, kernels.Limits(1e9, 10**6), {"threads": 2, "load": 3.0}, {})
    said = "\n".join(passes.remarks(report))
    assert "OTHER PROGRAMS" in said and "at least 1.00 ms" in said and "takes 2.00 times that" in said
    assert "four rows over one behind 64 tokens: outrider 4.00x, llama-cpp 4.00x" in said


def test_our_own_passes_leave_nothing_behind() -> None:
    target = MockBackend(MockConfig(vocab_size=64))
    with Engine(target) as engine:
        ours, tasks = passes.OwnPasses(engine, 700), passes.tasks_of(64, 4096)
        assert all(ours.seconds(task) > 0 for task in tasks) and {task.kind for task in tasks} == set(ours.kinds)
        assert target.num_slots == 0
    assert [task.kind for task in passes.tasks_of(64, 200)] == ["pass"] * 4 + ["decode", "together"]


def test_passes_without_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is named, and our own part goes on."""
    told: list[str] = []
    monkeypatch.setattr("outrider.bench.peers.find_spec", lambda name: None)
    monkeypatch.setattr(Engine, "load", lambda model, **_: Engine(MockBackend(MockConfig(vocab_size=16))))
    settings = passes.PassSettings(model=str(tmp_path), peers=("llama-cpp",), repeats=1)
    report = passes.compare(settings, told.append)
    assert any("pip install llama-cpp-python" in one for one in told)
    assert report.rows and {row.engine for row in report.rows} == {"outrider"}
    assert report.as_json()["limits"] is None and report.settings["repeats"] == 1
    with pytest.raises(ConfigError, match="llama-cpp only"):
        passes.PassSettings(model="mock", peers=("transformers",))


class FakeLibrary:
    """What of llama.h is used: a cache that must be told the right positions."""

    __version__ = "0"

    def __init__(self) -> None:
        self.cache: list[int] = []
        self.wanted: list[int] = []

    def Llama(self, path: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(ctx=None, n_vocab=lambda: 8)

    def llama_batch_init(self, size: int, *_: int) -> SimpleNamespace:
        fields = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(size)], **fields)

    def llama_decode(self, _: None, batch: SimpleNamespace) -> int:
        count = batch.n_tokens
        assert batch.pos[:count] == list(range(len(self.cache), len(self.cache) + count))
        self.cache += batch.token[:count]
        self.wanted.append(sum(batch.logits[:count]))
        return 0

    def llama_get_logits(self, _: None) -> object:
        return (ctypes.c_float * (8 * self.wanted[-1]))()

    def llama_get_memory(self, _: None) -> None:
        return None

    def llama_memory_seq_rm(self, _: None, sequence: int, start: int, end: int) -> None:
        assert (sequence, end) == (0, -1)
        del self.cache[start:]


def test_a_peers_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(passes_peer, "import_module", lambda name: library)
    peer = passes_peer.LlamaCppPasses({"path": "m.gguf", "threads": 1, "context": 64})
    assert peer.answer({"kind": "pass", "tokens": [*range(10), 7, 7], "rows": 2})["seconds"] >= 0
    assert library.wanted == [1] + [2] * 5 and library.cache == [*range(10), 7, 7]
    peer.answer({"kind": "pass", "tokens": [*range(12), 3], "rows": 1})
    assert library.wanted[6:] == [1] + [1] * 5 and library.cache == [*range(12), 3]
    peer.answer({"kind": "prefill", "tokens": [5] * 20, "rows": 1})
    peer.answer({"kind": "decode", "tokens": [5] * 4, "rows": 3})
    assert library.cache == [5] * 4 + [0] * 3 and library.wanted[12:] == [1] * 5


@pytest.mark.slow
def test_passes_of_a_model_on_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    arguments = ("bench", "passes", "--repeats", "1", "--json", str(out))
    peers = ("--peer", "llama-cpp") if find_spec("llama_cpp") else ()
    done = outrider(*arguments, *peers, patience_s=600.0)
    assert done.returncode == 0 and "a pass takes at least" in done.stdout, done.stderr
    assert {row["kind"] for row in json.loads(out.read_text())["rows"]} == {"pass", "prefill", "decode", "together"}


def test_what_parts_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    own = overhead.engine_time("greedy", width=2, batch=2, vocab_size=32, num_tokens=8, repeats=1)
    assert 0 < own.median_us <= own.wall_us and own.tokens_per_round > 1
    thread = overhead.thread_time(num_tokens=20, repeats=1)
    assert thread.wall_us > 0 and "thread" in thread.name
    monkeypatch.setattr(ahead, "DRIFTS", (0.0,))
    (reading,) = ahead.mock_readings(quick=True)
    assert reading.same and reading.fresh > 0.9
    monkeypatch.setattr(lookups, "PAST", 80_000)
    monkeypatch.setattr(lookups, "CONTEXT", 800)
    found = list(lookups.readings(quick=True))
    assert len(found) == 12 and all(one.median > 0 for one in found)


def test_kernels_and_simulate_on_the_command_line() -> None:
    done = outrider(
        "bench", "kernels", "--model", "mock-cost", "--rows", "2,4", "--contexts", "16", "--repeats", "2", "--json"
    )
    points = [json.loads(line) for line in done.stdout.splitlines()]
    assert [point["rows"] for point in points] == [1, 2, 4] and points[0]["ratio"] == 1.0
    assert "whole numbers" in outrider("bench", "kernels", "--rows", "many").stderr
    done = outrider("bench", "simulate", "--widths", "auto,2", "--batches", "1", "--json")
    assert [json.loads(line)["width"] for line in done.stdout.splitlines()] == ["auto", "2"]
    assert "choose one of" in outrider("bench", "simulate", "--curve", "steep").stderr


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("width", [1, 4])
def test_the_simulator_agrees_with_arithmetic(acceptance: float, width: int) -> None:
    """Without a batch there is a formula: tokens a round over what a round costs."""
    costs = simulate.Costs({1: 1.0, 2: 1.5, 5: 3.0}, draft_s=0.1, round_s=0.2)
    case = simulate.Case(simulate.constant(acceptance, width), costs, width, num_tokens=3000)
    tokens = sum(acceptance**place for place in range(width + 1))
    expected = tokens * (1.0 + 0.2) / (costs.pass_s(width + 1) + 0.2 + 0.1 * width)
    found = simulate.simulate(case)
    assert found.speed == pytest.approx(expected, rel=0.04) and found.tokens_per_round == pytest.approx(
        tokens, rel=0.04
    )


def test_rounds_in_which_the_draft_is_silent() -> None:
    costs = simulate.Costs({1: 1.0, 5: 2.0})
    always = simulate.simulate(simulate.Case((0.9, 0.8, 0.7, 0.6), costs, 4, num_tokens=2000))
    seldom = simulate.simulate(
        simulate.Case((0.9, 0.8, 0.7, 0.6), costs, 4, depths={0: 0.75, 4: 0.25}, num_tokens=2000)
    )
    assert always.tokens_per_round == pytest.approx(4.0, rel=0.05)
    assert seldom.tokens_per_round == pytest.approx(1.75, rel=0.08) and 1.0 < seldom.speed < always.speed


def test_costs_between_and_beyond_what_is_known() -> None:
    costs = simulate.Costs({1: 1.0, 3: 2.0, 9: 8.0})
    assert [costs.pass_s(rows) for rows in (1, 2, 3, 6, 9, 12)] == [1.0, 1.5, 2.0, 5.0, 8.0, 11.0]


def test_measured_beside_predicted() -> None:
    settings = [simulate.Setting("ngram", 2), simulate.Setting("suffix", 3, batch=2)]
    work = {"a": ["The rider the rider the rider", "open sky open sky"]}
    verdicts = list(simulate.measured("mock-text", settings, work=work, num_tokens=12, repeats=2))
    assert [one.setting for one in verdicts] == settings
    assert all(one.low <= one.measured <= one.high and one.predicted > 0 for one in verdicts)


def standing(width: int, ratios: list[float]) -> tune.Standing:
    return tune.Standing(tune.Way("ngram", "ngram", width), ratios, is_final=True)


@pytest.mark.parametrize(
    ("ratios", "is_chosen"),
    [
        ([1.3, 1.2, 1.25, 1.1], True),
        ([1.3, 1.2, 0.7, 0.8], False),  # the median is fine, and half of the prompts are slower
        ([1.01, 1.0, 1.02, 1.01], False),
        ([], False),
    ],
)
def test_what_tune_chooses(ratios: list[float], is_chosen: bool) -> None:
    final = standing(2, ratios)
    found = tune._judged("m", final, [standing(1, [9.0])], 3, 1.0, True)
    assert found.way == (final.way if is_chosen else None)
    assert tune._judged("m", None, [], 3, 1.0, False).way is None


def test_tune_writes_what_the_other_commands_read(tmp_path: Path) -> None:
    out = tmp_path / "o.toml"
    done = outrider(
        "tune", "--model", "mock-text", "--draft", "ngram", "--minutes", "0.05", "--max-tokens", "8", "--out", str(out)
    )
    assert done.returncode == 0 and str(out) in done.stdout, done.stderr
    assert settings_file.read(out)["model"] == "mock-text"
    out.write_text('model = "mock-text"\ndraft = "ngram"\nwidth = 3\n[measured]\n"ngram, width 3" = 1.2\n')
    answer = json.loads(outrider("generate", "a b a b a b", "--config", str(out), "--json", "--max-tokens", "6").stdout)
    assert answer["speculation"]["method"] == "ngram"
    over = outrider("generate", "x", "--config", str(out), "--draft", "suffix", "--json", "--max-tokens", "3")
    assert json.loads(over.stdout)["speculation"]["method"] == "suffix", over.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("drat = 'ngram'", "did you mean draft"),
        ("draft = 3", "draft takes str"),
        ("threads = true", "threads takes int"),
        ("draft = ", "is no TOML"),
        (None, "cannot read"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "o.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        settings_file.read(path)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    path, settings = tmp_path / "o.toml", {"model": 'a "b"\\c', "width": 4, "tree": True}
    settings_file.write(path, settings, ["a comment"], {"x, y": 1.5})
    assert settings_file.read(path) == {**settings, "width": "4"}


def test_a_model_that_is_not_there_is_told_before_the_work() -> None:
    for arguments in (("tune", "--draft", "ngrm"), ("tune", "--prompts", "nothing.jsonl")):
        done = outrider(*arguments)
        assert done.returncode == 1 and "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_plots(tmp_path: Path) -> None:
    from outrider.bench.plots import plot_curve

    points = [kernels.Point(8, rows, 1.0 * rows, 0.9, 1.1, rows, 0.5, None) for rows in (1, 2, 4)]
    plot_curve(points, "mock", tmp_path / "a.svg")
    assert "drafts can pay" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 5000
    with pytest.raises(ConfigError, match="another file"):
        plot_curve(points, "mock", tmp_path / "missing" / "a.svg")


def test_the_comparison_on_the_command_line(tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text('{"category": "a", "turns": ["the rider the rider"]}\n')
    common = ("bench", "--model", "mock-text", "--prompts", str(prompts), "--max-tokens", "8", "--repeats", "1")
    done = outrider(*common, "--draft", "ngram", "--width", "2", "--json", str(out), "--markdown")
    assert done.returncode == 0 and "| outrider | ngram | 2 |" in done.stdout, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {(row["method"], row["width"], row["identical"]) for row in rows} >= {("ngram", 2, True)}
    prompts.write_text("")
    for wrong, said in (
        (common, "no prompts"),
        (("bench", "--draft", "ngrm"), "ngram"),
        (("bench", "--peer", "vllm"), "transformers"),
        (("bench", "--width", "wide"), "auto or numbers"),
        (("bench", "--model", "mock", "engine"), "write it after engine"),
        (("bench", "--plot", "a.txt"), ".svg"),
    ):
        done = outrider(*wrong)
        assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_document_of_everything(tmp_path: Path) -> None:
    out = tmp_path / "all.md"
    done = outrider(
        *("bench", "document", "--model", "mock-text", "--draft", "ngram,suffix", "--width", "2", "--limit", "1"),
        *("--max-tokens", "6", "--repeats", "1", "--out", str(out)),
    )
    text = out.read_text()
    assert done.returncode == 0, done.stderr
    assert "## What a pass costs" in text and "## The simulator" in text and "| outrider | suffix | 2 |" in text
    assert {path.name for path in tmp_path.iterdir()} == {"all.md", "all.json", "all-ratios.svg", "all-curve.svg"}


def test_each_prompt_once_with_drafts_and_without(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"category": kind, "turns": [f"{kind} {number}"]} for kind in ("chat", "sums") for number in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["bench", "fresh", "--model", "mock-text", "--prompts", str(prompts), "--limit", "2", "--max-tokens", "12"]
    told = outrider(*asked, "--json")
    assert told.returncode == 0, told.stderr
    found = {reading["kind"]: reading for reading in map(json.loads, told.stdout.splitlines())}
    assert {kind: len(reading["gains"]) for kind, reading in found.items()} == {"chat": 2, "sums": 2, "all": 4}
    assert found["all"]["tokens"] == 48 and found["all"]["differing"] == 0
    whole = found["chat"]["plain_s"] + found["sums"]["plain_s"]
    assert found["all"]["gain"] == pytest.approx(whole / found["all"]["drafted_s"])
    assert "x plain" in outrider(*asked, "--draft", "ngram").stdout
