"""The comparison: arithmetic on made-up times, order, interrupts, peers in processes, and real answers of a mock."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.bench import compare, peers
from outrider.bench.compare import Comparison, Report, tasks_of
from outrider.bench.compare_settings import CompareSettings, parse_trees, parse_widths
from outrider.bench.contest import Answer, OwnContestant, Style, Task, drafts_of, own_contestants
from outrider.bench.peer_process import Rounds, TransformersPeer
from outrider.bench.peers import PeerError, PeerProcess, Wish
from outrider.bench.report import as_json, as_markdown, as_text, check_plot, plot, write_json
from outrider.bench.rows import Row, first_difference, interval
from outrider.bench.work import OWN
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, MissingPackageError
from outrider.types import Request

PLAIN, QUICK = Style("ours", "plain", 0), Style("ours", "quick", 4)
THEIRS = Style("theirs", "plain", 0)
TOLD = ("engine", "method", "width", "category", "tokens_per_s", "ratio_to_plain", "ratio_to_plain_low")
TOLD += ("ratio_to_plain_high", "tokens_per_round", "acceptance_rate", "identical")
SMALL: dict[str, Any] = {"model": "mock-text", "limit": 1, "max_tokens": 12, "repeats": 1}


class Fake:
    """Answers at once, and says that it took so long."""

    is_coupled = True

    def __init__(self, style: Style, seconds: Callable[[int], float], log: list[str] | None = None) -> None:
        self.style, self._seconds, self._log = style, seconds, log if log is not None else []
        self.calls = 0

    def answer(self, task: Task) -> Answer:
        self.calls += 1
        self._log.append(f"{self.style.method} {task.kind}{task.seeds[0]}")
        seconds = self._seconds(self.calls)
        drafted = 0 if self.style.method == "plain" else 4
        return Answer([list(task.prompts[0])], seconds, seconds / 4, 2, drafted, drafted // 2)


def task(kind: str, number: int, temperature: float = 0.0) -> Task:
    return Task(kind, ((5, 6, 7, 8),), (number,), 4, temperature)


def contest(contestants: Sequence[Any], tasks: Sequence[Task], repeats: int = 2) -> Comparison:
    return Comparison(contestants, tasks, repeats=repeats, settle=lambda seconds: None)


def rows_of(report: Report) -> dict[tuple[str, str, str], Row]:
    return {(row.engine, row.method, row.category): row for row in report.rows}


def test_ratios_are_taken_within_a_repeat_so_that_drift_cancels() -> None:
    """The machine becomes ten times slower from repeat to repeat; the ratio stays."""
    drift = [1.0, 1.0, 10.0, 100.0]  # the first is the warm-up
    ours = contest(
        [Fake(PLAIN, lambda call: 3.0 * drift[call - 1]), Fake(QUICK, lambda call: 2.0 * drift[call - 1])],
        [task("chat", 0)],
        repeats=3,
    )
    ours.run()
    row = rows_of(ours.report())["ours", "quick", "chat"]
    assert (row.ratio_to_plain, row.ratio_to_plain_low, row.ratio_to_plain_high) == (1.5, 1.5, 1.5)
    assert row.tokens_per_s == 4 / 20 and (row.tokens_per_s_low, row.tokens_per_s_high) == (4 / 200, 4 / 2)
    assert row.tokens_per_round == 2 and row.acceptance_rate == 0.5 and row.repeats == 3
    assert row.first_token_s == 5.0 and row.time_split is None and row.acceptance_by_position is None


def test_a_kind_is_its_prompts_together_and_all_is_the_geometric_mean() -> None:
    tasks = [task("chat", 0), task("chat", 1), task("code", 2)]
    # warm-up: chat, code; then chat, chat, code
    quick = [9.0, 9.0, 1.0, 3.0, 8.0]
    ours = contest([Fake(PLAIN, lambda call: 4.0), Fake(QUICK, lambda call: quick[call - 1])], tasks, repeats=1)
    ours.run()
    rows = rows_of(ours.report())
    assert rows["ours", "quick", "chat"].ratio_to_plain == 2.0
    assert rows["ours", "quick", "code"].ratio_to_plain == 0.5
    assert rows["ours", "quick", "all"].ratio_to_plain == 1.0
    assert rows["ours", "quick", "all"].tokens_per_s == 12 / 12
    assert rows["ours", "plain", "all"].ratio_to_plain == 1.0


def test_plain_is_of_the_same_engine() -> None:
    lookup = Style("theirs", "prompt lookup", 10)
    both = contest(
        [Fake(PLAIN, lambda _: 1.0), Fake(THEIRS, lambda _: 8.0), Fake(lookup, lambda _: 4.0)], [task("chat", 0)]
    )
    both.run()
    rows = rows_of(both.report())
    assert rows["theirs", "prompt lookup", "chat"].ratio_to_plain == 2.0
    alone = contest([Fake(lookup, lambda _: 4.0)], [task("chat", 0)])
    alone.run()
    row = rows_of(alone.report())["theirs", "prompt lookup", "chat"]
    assert row.ratio_to_plain is None and row.identical is None


def test_intervals() -> None:
    assert interval([2.0, 1.0, 4.0]) == (1.0, 4.0), "of few repeats the range is told"
    values = [1.0 + 0.01 * number for number in range(20)]
    low, high = interval(values)
    assert values[0] < low < 1.095 < high < values[-1] and interval(values) == (low, high)
    assert interval([3.0] * 7) == (3.0, 3.0)


def test_all_take_turns_on_every_prompt_and_the_order_turns_round() -> None:
    log: list[str] = []
    waits: list[float] = []
    three = [Fake(style, lambda _: 1.0, log) for style in (PLAIN, QUICK, THEIRS._replace(method="other"))]
    tasks = [task("a", 0), task("a", 1), task("b", 2)]
    ours = Comparison(three, tasks, repeats=2, settle=waits.append)
    steps: list[tuple[int, int, str]] = []
    ours.run(lambda done, total, what: steps.append((done, total, what)))
    there, back = ("plain", "quick", "other"), ("other", "quick", "plain")
    expected = [f"{name} {prompt}" for prompt in ("a0", "b2") for name in there]  # the warm-up
    expected += [f"{name} {prompt}" for prompt in ("a0", "a1", "b2") for name in back]
    expected += [f"{name} {prompt}" for prompt in ("a0", "a1", "b2") for name in there]
    assert log == expected
    assert [step[0] for step in steps] == list(range(25)) and {step[1] for step in steps} == {24}
    assert steps[0][2] == "warm-up, a: ours plain" and "repeat 2 of 2, b" in steps[-2][2]
    assert len(waits) == 14, "another engine waits for the threads of the last one"


@pytest.mark.parametrize(("at", "repeats"), [(0, 0), (3, 0), (6, 1), (9, 2), (13, 4)])
def test_what_an_interrupted_run_has_is_told(at: int, repeats: int, tmp_path: Path) -> None:
    def stop(call: int) -> float:
        if call > at:
            raise KeyboardInterrupt
        return 2.0

    tasks = [task("a", 0), task("a", 1), task("b", 2)]
    ours = contest([Fake(PLAIN, lambda _: 3.0), Fake(QUICK, stop)], tasks, repeats=4)
    with pytest.raises(KeyboardInterrupt):
        ours.run()
    report = ours.report()
    rows = rows_of(report)
    assert report.settings["complete"] is False and "STOPPED" in as_text(report)
    write_json(report, tmp_path / "bench.json")
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == len(rows)
    assert (("ours", "quick", "a") in rows) == (at > 2)
    if repeats:
        row = rows["ours", "quick", "a"]
        assert row.ratio_to_plain == 1.5 and row.repeats == repeats


def test_half_a_repeat_is_better_than_nothing() -> None:
    def stop(call: int) -> float:
        if call == 3:
            raise KeyboardInterrupt
        return 2.0

    ours = contest([Fake(PLAIN, stop), Fake(QUICK, lambda _: 1.0)], [task("a", 0), task("a", 1)], repeats=4)
    with pytest.raises(KeyboardInterrupt):
        ours.run()
    rows = rows_of(ours.report())
    assert rows["ours", "quick", "a"].ratio_to_plain == 2.0, "of the one prompt that both have answered"
    assert rows["ours", "quick", "a"].answers == 2 and rows["ours", "plain", "a"].answers == 1


def test_differences_are_counted() -> None:
    class Wrong(Fake):
        def answer(self, task: Task) -> Answer:
            answer = super().answer(task)
            if task.kind == "b":
                answer.tokens[0][self.calls % 2 + 1] = 99
            return answer

    tasks = [task("a", 0), task("b", 1)]
    ours = contest([Fake(PLAIN, lambda _: 1.0), Wrong(QUICK, lambda _: 1.0)], tasks)
    ours.run()
    rows = rows_of(ours.report())
    good, bad, whole = (rows["ours", "quick", kind] for kind in ("a", "b", "all"))
    assert (good.identical, good.differences, good.first_difference) == (True, 0, None)
    assert (bad.identical, bad.differences, bad.first_difference) == (False, 3, 1)
    assert (whole.identical, whole.differences) == (False, 3)
    assert "NO, 3 differ, first at token 1" in as_text(ours.report())
    assert first_difference([1, 2], [1, 2, 3]) == 2 and first_difference([], []) is None


def test_where_chance_decides_nobody_is_called_identical() -> None:
    lookup = Fake(THEIRS._replace(method="prompt lookup"), lambda _: 1.0)
    lookup.is_coupled = False
    ours = contest([Fake(THEIRS, lambda _: 1.0), lookup], [task("a", 0, temperature=0.7)])
    ours.run()
    rows = rows_of(ours.report())
    assert rows["theirs", "prompt lookup", "a"].identical is None
    assert rows["theirs", "plain", "a"].identical is True
    assert rows["theirs", "plain", "a"].agrees_with_outrider is None


def test_who_fails_leaves_and_the_others_go_on() -> None:
    def fail(call: int) -> float:
        if call == 2:
            raise PeerError("it fell over")
        return 1.0

    class Short(Fake):
        def answer(self, task: Task) -> Answer:
            return Answer([[1]], 1.0, 1.0)

    short = Style("ours", "short", 1)
    ours = contest(
        [Fake(PLAIN, lambda _: 1.0), Fake(QUICK, fail), Short(short, lambda _: 1.0)], [task("a", 0)], repeats=3
    )
    ours.run()
    report = ours.report()
    assert ours.is_complete and rows_of(report).keys() == {("ours", "plain", "a")}
    assert report.settings["notes"] == [
        "ours short, width 1 takes no further part: it gave [1] tokens where 4 were asked for",
        "ours quick, width 4 takes no further part: it fell over",
    ]


@pytest.fixture(scope="module")
def greedy() -> Report:
    settings = {**SMALL, "draft": "ngram,mock-text,auto", "widths": ("auto", 3), "trees": (6,), "repeats": 2}
    with Comparison.open(CompareSettings(**settings)) as ours:
        ours.run()
        return ours.report()


def test_answers_of_a_mock_are_plain_ones(greedy: Report) -> None:
    styles = {row.style for row in greedy.rows}
    expected = {("plain", 0, False), ("auto", "auto", False)}
    for method in ("ngram", "mock-text"):
        expected |= {(method, "auto", False), (method, 3, False), (method, 6, True)}
    assert {(style.method, style.width, style.is_tree) for style in styles} == expected
    assert {row.category for row in greedy.rows} == {*OWN, "all"}
    assert all(row.identical is True and row.agrees_with_outrider == 1.0 for row in greedy.rows)
    drafted = next(row for row in greedy.rows if row.style[1:] == ("mock-text", 3, False) and row.category == "all")
    assert drafted.tokens_per_round is not None and drafted.tokens_per_round > 1.2
    assert drafted.acceptance_by_position is not None and len(drafted.acceptance_by_position) == 3
    assert drafted.time_split is not None and abs(sum(drafted.time_split.values()) - 1.0) < 1e-6
    assert all(share >= 0 for share in drafted.time_split.values()) and drafted.first_token_s > 0


def test_json_schema(greedy: Report) -> None:
    told = json.loads(json.dumps(as_json(greedy)))
    assert list(told) == ["machine", "versions", "settings", "rows"]
    assert all(name in row for row in told["rows"] for name in TOLD)
    assert {"cpu", "cores", "memory_bytes", "os"} <= told["machine"].keys()
    assert {"python", "numpy", "torch", "outrider", "commit"} <= told["versions"].keys()
    assert told["settings"]["complete"] is True and told["settings"]["model"] == "mock-text"


def test_tables_and_plot(greedy: Report, tmp_path: Path) -> None:
    text, marked = as_text(greedy), as_markdown(greedy)
    for part in ("of plain", "retrieval", "mock-text", "tree 6", "drafting", "numpy"):
        assert part in text and part in marked
    assert "| :-- |" in marked and "STOPPED" not in text
    plot(greedy, tmp_path / "ratios.svg")
    assert "same engine" in (tmp_path / "ratios.svg").read_text()


def test_together_and_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several prompts at once, each with a seed and a tenant of its own."""
    asked: list[Request] = []
    open_streams = Engine.open_streams

    def spy(engine: Engine, requests: Sequence[Request], **settings: Any) -> Any:
        asked.extend(request for request in requests if isinstance(request, Request))
        return open_streams(engine, requests, **settings)

    monkeypatch.setattr(Engine, "open_streams", spy)
    settings = CompareSettings(
        **{**SMALL, "limit": 3}, draft="mock-text", widths=(3,), batch=2, temperature=0.8, peers=("transformers",)
    )
    with Comparison.open(settings) as ours:
        assert [len(some.prompts) for some in ours.tasks[:2]] == [2] * 2
        assert ours.notes == ["transformers takes no part: a mock has no weights that others could load"]
        ours.tasks = ours.tasks[:3]
        ours._record.kinds = ours._record.kinds[:3]
        ours.run()
        report = ours.report()
    assert all(row.identical is True for row in report.rows)
    assert len({request.tenant for request in asked}) == len(asked)
    assert {request.sampling.rule for request in asked} == {"coupled"} and all(request.ignore_eos for request in asked)


def test_every_prompt_is_asked_once_and_long_ones_are_left_out() -> None:
    engine = Engine.load("mock-text")
    work = {"a": ["one", "two", "three"], "b": ["x" * 40_000]}
    settings = CompareSettings(**{**SMALL, "limit": None, "batch": 2})
    tasks, notes = tasks_of(engine, work, settings)
    assert [(some.kind, len(some.prompts)) for some in tasks] == [("a", 2), ("a", 2)]
    assert tasks[1].prompts[1] == tasks[0].prompts[0], "a group is filled up with the first prompts"
    assert len({seed for some in tasks for seed in some.seeds}) == 4
    assert notes == ["1 prompts of b do not fit into the context, and are left out"]
    with pytest.raises(ConfigError, match="no prompt fits"):
        tasks_of(engine, {"b": work["b"]}, settings)


def test_drafts() -> None:
    assert drafts_of("mock-text", "ngram, layerskip:4,auto")[:3] == (
        ["ngram", "layerskip:4"],
        [None, "layerskip:4"],
        True,
    )
    assert drafts_of("smollm2", None).load == ["suffix", "eagle"] and drafts_of("smollm2", "auto").with_auto
    assert drafts_of("mistral-7b", "auto").with_auto is False  # of a single one there is nothing to choose
    assert drafts_of("mock-text", "none").load == []
    assert drafts_of("smollm2", "ngram,smollm2").assistant == "smollm2"
    engine = Engine.load("mock-text", draft="none")
    only = own_contestants(engine, drafts_of("mock-text", "none"), ("auto",))
    assert [one.style.name for one in only] == ["outrider plain"] and isinstance(only[0], OwnContestant)


def test_wrong_settings_are_told_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.Engine, "load", None)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for settings, said in (
        ({"draft": "sufix"}, "did you mean suffix"),
        ({"draft": "bogus"}, "there is no draft 'bogus'; choose none, ngram"),
        ({"model": str(tmp_path)}, "has no usual draft"),
        ({"prompts": empty}, "holds no prompts"),
        ({"prompts": tmp_path / "none.jsonl"}, "cannot read"),
        ({"peers": ("vllm",)}, "no peer 'vllm'; known are transformers, llama-cpp"),
        ({"peers": ("llama-cpp", "llama-cpp")}, "named twice"),
        ({"repeats": 0}, "repeats"),
        ({"limit": 0}, "limit"),
        ({"widths": ()}, "no width"),
    ):
        with pytest.raises(ConfigError, match=said):
            Comparison.open(CompareSettings(**{**SMALL, **settings}))
    assert parse_widths("auto, 3,3") == ("auto", 3) and parse_trees("8,16") == (8, 16)
    for text in ("x", "0", "", "-1", "3,,4", "1.5"):
        with pytest.raises(ConfigError, match="width takes auto or numbers"):
            parse_widths(text)
    with pytest.raises(ConfigError, match="tree takes numbers"):
        parse_trees("auto")
    for path, said in ((tmp_path / "a.txt", "a plot is a file"), (tmp_path / "no" / "a.svg", "there is no folder")):
        with pytest.raises(ConfigError, match=said):
            check_plot(path)


def test_what_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    monkeypatch.setattr("outrider.bench.report.find_spec", lambda module: None)
    told: list[str] = []
    with Comparison.open(CompareSettings(**SMALL, peers=("llama-cpp", "transformers")), told.append) as ours:
        assert (
            told[0]
            == ours.notes[0]
            == ("llama-cpp is not installed, so it takes no part; install it with pip install llama-cpp-python")
        )
        assert "pip install 'outrider[hf]'" in told[1] and len(ours.notes) == 2
    with pytest.raises(MissingPackageError, match="outrider\\[bench\\]"):
        check_plot(tmp_path / "a.svg")


def test_what_a_peer_cannot_do_is_told(tmp_path: Path) -> None:
    assert "GGUF files only" in str(peers.why_unable("llama-cpp", tmp_path, 1))
    assert "one prompt at a time, and 4" in str(peers.why_unable("transformers", tmp_path, 4))
    assert peers.why_unable("transformers", tmp_path, 1) is None
    assert peers.why_unable("llama-cpp", tmp_path / "model.gguf", 1) is None


FAKE_PEER = """
import os, sys
from outrider.bench.peer_process import serve

class Peer:
    def __init__(self, wish):
        print("noise while loading")
        if wish["threads"] == 13:
            raise ValueError("cannot read this file\\nand more")
        if wish["threads"] == 14:
            os._exit(3)
        self.wish = wish

    def about(self):
        return {"version": "1.2", "methods": [["plain", 0], ["prompt lookup", 2]], "notes": ["is only a fake"]}

    def answer(self, task):
        os.write(1, b"noise of a library\\n")
        if task["seed"] == 1:
            raise RuntimeError("out of memory")
        if task["seed"] == 2:
            sys.exit("the last words")
        if task["seed"] == 3:
            import time
            time.sleep(60)
        if task["seed"] == 4:
            return {"tokens": []}
        drafted = 0 if task["method"] == "plain" else task["width"]
        seconds = 2.0 if task["method"] == "plain" else 1.0
        return {"tokens": task["prompt"], "seconds": seconds, "first_s": 0.5, "rounds": 4, "drafted": drafted,
                "accepted": drafted}

serve(Peer)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[[int], PeerProcess]:
    script = tmp_path / "fake_peer.py"
    script.write_text(FAKE_PEER)

    def start(threads: int = 1) -> PeerProcess:
        return PeerProcess("fake", Wish(tmp_path, None, threads, 64), [sys.executable, str(script)])

    return start


def test_a_peer_in_its_own_process(start: Callable[[], PeerProcess]) -> None:
    with contest([Fake(PLAIN, lambda _: 5.0)], [task("a", 0), task("b", 9)]) as ours:
        ours.add_peer(start())
        ours.run()
        report = ours.report()
    rows = rows_of(report)
    assert rows["fake", "prompt lookup", "all"].ratio_to_plain == 2.0
    assert rows["fake", "prompt lookup", "a"].acceptance_rate == 1.0 and rows["fake", "plain", "a"].tokens_per_s == 2.0
    assert report.versions["fake"] == "1.2" and report.settings["notes"] == ["fake is only a fake"]


@pytest.mark.parametrize(
    ("threads", "said"),
    [
        (13, "fake takes no part: it failed with ValueError: cannot read this file"),
        (14, "fake takes no part: its process ended: noise while loading"),
    ],
)
def test_a_peer_that_cannot_load(start: Callable[[int], PeerProcess], threads: int, said: str) -> None:
    with pytest.raises(PeerError) as raised:
        start(threads)
    assert raised.value.message == said


@pytest.mark.parametrize(
    ("seed", "said"),
    [
        (1, "it failed with RuntimeError: out of memory"),
        (2, "its process ended: the last words"),
        (3, "it did not answer within 0.3 seconds"),
        (4, "it left out or misspelt 'seconds'"),
    ],
)
def test_a_peer_that_fails_in_the_middle(
    start: Callable[[], PeerProcess], monkeypatch: pytest.MonkeyPatch, seed: int, said: str
) -> None:
    if seed == 3:
        monkeypatch.setattr(peers, "ANSWER_PATIENCE_S", 0.3)
    with contest([Fake(PLAIN, lambda _: 5.0)], [task("a", seed)]) as ours:
        ours.add_peer(start())
        ours.run()
        report = ours.report()
    assert [(row.engine, row.repeats) for row in report.rows] == [("ours", 2)]
    assert f"fake plain takes no further part: {said}" in ours.notes
    assert len(ours.contestants) == 1


def test_rounds_of_peers() -> None:
    """A prompt of 10 with 3 drafts, then passes of 1 + 3 and of 1: 5 tokens, so 2 of 6 drafts were kept."""
    rounds = Rounds()
    for rows in (13, 4, 1):
        rounds.add(rows)
    assert rounds.report(10, 5) == {"rounds": 3, "drafted": 6, "accepted": 2}


def test_transformers_as_a_peer(tmp_path: Path) -> None:
    """Without its process: methods, counts and identity on a model of random weights."""
    from tiny import save_folder, tiny

    save_folder(tiny("llama"), tmp_path)
    wish = {"path": str(tmp_path), "assistant": str(tmp_path), "threads": 1, "context": 64}
    peer = TransformersPeer(wish)
    about = peer.about()
    assert about["methods"] == [["plain", 0], ["prompt lookup", 2], ["prompt lookup", 10], ["assistant", "auto"]]
    prompt = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    answers = []
    for method, width in about["methods"]:
        question = {"method": method, "width": width, "prompt": prompt, "max_tokens": 12, "temperature": 0.0, "seed": 0}
        answers.append(peer.answer(question))
    assert all(answer["tokens"] == answers[0]["tokens"] and len(answer["tokens"]) == 12 for answer in answers)
    assert answers[0]["rounds"] == 12 and answers[0]["drafted"] == 0 and answers[2]["drafted"] > 0
    assert answers[3]["rounds"] < 12 and answers[3]["accepted"] == answers[3]["drafted"], "the model assists itself"
    assert all(0 < answer["first_s"] < answer["seconds"] for answer in answers)
