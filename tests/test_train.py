"""Training a head, from prompts to faster rounds, on a tiny model with random weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.backends.cuda.backend import GpuBackend
from outrider.backends.eagle_head import EagleHead
from outrider.backends.head_base import Entries
from outrider.backends.transformer import TransformerBackend
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, ModelFileError
from outrider.kv.pages import Pages
from outrider.models.heads import open_head
from outrider.models.random_file import SHAPES, RandomFile, build_shape
from outrider.train import distance
from outrider.train.batches import plan
from outrider.train.eagle import CHECKPOINT, EagleTrainer, Report, most_said
from outrider.train.features import Features
from outrider.train.headfile import write_head
from outrider.train.net import Past
from outrider.train.optimizer import Muon
from outrider.train.run import evaluate, train
from outrider.train.settings import TrainSettings
from outrider.train.texts import Texts, prompts_from

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 101  # tokens of the tiny model


@pytest.fixture(scope="module")
def model() -> str:
    """It counts: what it says can be learned."""
    SHAPES["tiny-taught"] = build_shape("llama", 7, 32, (4, 2, 8), 48, SIZE, context=256)
    return "random:tiny-taught:counting"


def settings_for(model: str, **changes: Any) -> TrainSettings:
    given: dict[str, Any] = {
        "num_prompts": 40, "held_out": 4, "max_tokens": 24, "steps": 3, "updates": 60, "tokens": 320, "length": 40,
        "rate": 5e-3, "save_every": 10,
    }  # fmt: skip
    return TrainSettings(model=model, **{**given, **changes})


def texts_of(model: str, settings: TrainSettings) -> Texts:
    """The model's own answers to random prompts, as `texts.answer` gathers them."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, SIZE, 6).tolist() for _ in range(settings.num_prompts)]
    with Engine.load(model, draft="none", backend="torch") as engine:
        results = engine.generate(prompts, temperature=0.0, max_tokens=settings.max_tokens, ignore_eos=True)
    return Texts([[*prompt, *one.token_ids] for prompt, one in zip(prompts, results, strict=True)], [6] * len(prompts))


@pytest.fixture(scope="module")
def texts(model: str) -> Texts:
    return texts_of(model, settings_for(model))


def trainer(model: str, texts: Texts, folder: Path, **changes: Any) -> tuple[Engine, EagleTrainer]:
    folder.mkdir(parents=True, exist_ok=True)
    engine = Engine.load(model, draft="none", backend="torch", cache_tokens=4096)
    return engine, EagleTrainer(engine, texts, settings_for(model, **changes), folder)


def state(one: EagleTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in one.net.state_dict().items()}


def test_a_head_learns_and_drafts_better(model: str, texts: Texts, tmp_path: Path) -> None:
    """Loss falls, more is kept, and the written head is a better draft than an untrained one."""
    held = [text[:6] for text in texts.tokens[-4:]]
    engine, one = trainer(model, texts, tmp_path / "head", updates=60)
    with engine:
        one.write(tmp_path / "untrained")
        reports: list[Report] = []
        one.run(reports.append)
    assert reports[-1].loss < reports[0].loss and reports[-1].kept[0] > reports[0].kept[0] + 0.1
    assert reports[-1].kept == sorted(reports[-1].kept, reverse=True) and len(reports[-1].kept) == 3
    before, after = (evaluate(model, tmp_path / name, held, 24) for name in ("untrained", "head"))
    assert after.tokens_per_round > before.tokens_per_round + 0.2
    assert after.kept_by_place[0] > before.kept_by_place[0] + 0.2 and after.num_prompts == 4


@pytest.mark.parametrize("vocabulary", [None, 60])
def test_what_is_trained_is_what_drafts(model: str, texts: Texts, tmp_path: Path, vocabulary: int | None) -> None:
    """Outputs of the trained network, unrolled, are those of the head that was written and read again."""
    engine, one = trainer(model, texts, tmp_path, vocabulary=vocabulary)
    with engine:
        one.run(lambda report: None, until=5)
        write_head(
            tmp_path, one.net, engine.loop.target.spec, layers=one.layers, ids=one.ids,  # type: ignore[attr-defined]
            context=256, made_for=one.made_for, dtype=torch.float32,
        )  # fmt: skip
        text = texts.tokens[0][:12]
        states = Features(engine.loop.target, one.layers).of([text], [6]).states
        tokens, features, length = torch.tensor([text]), states[..., :-32], len(text) - 3
        with torch.no_grad():
            hidden, past, wanted = one.net.fuse(features[:, :length]), Past([], []), []
            for step in range(2):
                embedded = one.features.embed(tokens[:, 1 + step : 1 + step + length])
                hidden = one.net(embedded, hidden, step, past)
                wanted.append(one._logits(hidden)[0])
    file = open_head(tmp_path)
    target = TransformerBackend(RandomFile(model.removeprefix("random:")), Pages(64, 4))
    target.fingerprint = file.made_for
    head = EagleHead(file, target)
    slot = target.open((), 40)
    assert slot is not None
    target.pages.make_room(slot, 40)
    entries = Entries(
        [slot], [0], [0], [length], text[1 : 1 + length], head.fuse(list(features[0, :length].split(32, -1)))
    )
    outputs = head.read(entries)
    columns = slice(None) if one.ids is None else one.ids
    assert torch.allclose(head.rows(outputs)[:, columns], wanted[0], atol=1e-4)
    last = length - 1  # the second step of the last entry: its own output, and the token after
    again = Entries([slot], [0], [length], [1], [text[last + 2]], head.again(outputs[last:]))
    assert torch.allclose(head.rows(head.read(again))[:, columns], wanted[1][last:], atol=1e-4)


def test_a_run_that_was_broken_off_ends_with_the_same_weights(model: str, texts: Texts, tmp_path: Path) -> None:
    engine, whole = trainer(model, texts, tmp_path / "whole", updates=20)
    with engine:
        whole.run(lambda report: None)
        wanted = state(whole)
    for until in (7, 13, None):  # killed twice, after what was saved at 7 and at 13
        engine, part = trainer(model, texts, tmp_path / "part", updates=20)
        with engine:
            part.run(lambda report: None, until=until)
            found = state(part)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (tmp_path / "part" / CHECKPOINT).exists()


def test_the_same_settings_give_the_same_head(model: str, texts: Texts, tmp_path: Path) -> None:
    heads = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        engine, one = trainer(model, texts, tmp_path / name, updates=3, seed=seed)
        with engine:
            one.run(lambda report: None)
        heads.append((tmp_path / name / "model.safetensors").read_bytes())
    assert heads[0] == heads[1] != heads[2]


def test_a_run_may_begin_with_a_head(model: str, texts: Texts, tmp_path: Path) -> None:
    """Its weights, as they were written; the tokens it chooses among may be others. A head that is no beginning for
    this run is refused with the reason."""
    engine, first = trainer(model, texts, tmp_path / "first", updates=5)
    with engine:
        first.run(lambda report: None)
    begun = str(tmp_path / "first")
    engine, second = trainer(model, texts, tmp_path / "second", start=begun, vocabulary=40, seed=9)
    with engine:
        for name, value in state(first).items():
            assert torch.equal(second.net.state_dict()[name], value.bfloat16().float()), name
        second.run(lambda report: None, until=3)
        second.save()
    (tmp_path / "first").rename(tmp_path / "elsewhere")  # a run that goes on needs it no more
    engine, again = trainer(model, texts, tmp_path / "second", start=begun, vocabulary=40, seed=9)
    with engine:
        assert again.update == 3
        assert all(torch.equal(value, state(second)[name]) for name, value in state(again).items())
    with pytest.raises(ConfigError, match="with itself"):
        trainer(model, texts, tmp_path / "elsewhere" / ".." / "new", start=str(tmp_path / "new"))
    config = json.loads((tmp_path / "elsewhere" / "config.json").read_text())
    for change, message in (
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "other layers"),
        ({"outrider": {"made_for": {"fingerprint": "0" * 32}}}, "another model"),
    ):
        (tmp_path / "elsewhere" / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError, match=message):
            trainer(model, texts, tmp_path / "third", start=str(tmp_path / "elsewhere"))


def test_from_a_file_of_prompts_to_a_head(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    random = np.random.default_rng(1)
    lines = [{"tokens": random.integers(3, SIZE, 6).tolist()} for _ in range(12)]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    settings = settings_for(model, prompts=(str(path),), num_prompts=12, held_out=2, updates=4, max_tokens=16)
    said: list[str] = []
    found = train(settings, tmp_path / "out", device="cpu", say=said.append, report=lambda report: None)
    assert found is not None and found.tokens_per_round >= 1.0 and found.num_prompts == 2
    assert any("12/12 answers" in line for line in said) and any("update 0 is next" in line for line in said)
    assert open_head(tmp_path / "out").kept == pytest.approx(found.kept_by_place, abs=1e-3), "it goes with the head"
    again: list[str] = []
    train(settings, tmp_path / "out", device="cpu", say=again.append, report=lambda report: None)
    assert not any("answers" in line for line in again) and "update 4 is next" in again[-1], "nothing is done twice"
    with pytest.raises(ConfigError, match=r"was begun with updates 4, not 5; keep that, or choose another --out"):
        train(settings_for(model, prompts=(str(path),), num_prompts=12, held_out=2, updates=5, max_tokens=16),
              tmp_path / "out", device="cpu", say=said.append, report=lambda report: None)  # fmt: skip


def test_a_head_of_other_weights_is_refused(model: str, texts: Texts, tmp_path: Path) -> None:
    engine, one = trainer(model, texts, tmp_path / "head", updates=1)
    with engine:
        one.run(lambda report: None)
    other = "random:tiny-taught"  # it does not count
    with pytest.raises(
        ModelFileError, match=r"the head was trained on other weights .* train one: outrider train eagle"
    ):
        Engine.load(other, draft=f"eagle:{tmp_path / 'head'}", backend="torch")


def test_a_head_is_found_by_the_weights_it_was_made_for(
    model: str, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no EAGLE head belongs to .*; train one \(outrider train eagle\), or write"):
        Engine.load(model, draft="eagle", backend="torch")
    for name in ("older", "newer"):
        engine, one = trainer(model, texts, tmp_path / "heads" / name, updates=1)
        with engine:
            one.run(lambda report: None)
    os.utime(tmp_path / "heads" / "older" / "config.json", (1, 1))
    (tmp_path / "heads" / "broken").mkdir()
    (tmp_path / "heads" / "broken" / "config.json").write_text("{")
    with Engine.load(model, draft="ngram,eagle", backend="torch", width=2) as engine:
        drafter: Any = engine.loop.router.drafters["eagle"]
        assert engine.method == "ngram,eagle" and drafter.head.name == "newer"
        assert len(engine.generate([5, 6, 7], max_tokens=6, temperature=0.0).token_ids) == 6
    with pytest.raises(ConfigError, match="no EAGLE head belongs to"):
        Engine.load("random:tiny-taught", draft="eagle", backend="torch")


def test_a_line_is_what_ends_with_a_newline(model: str, tmp_path: Path) -> None:
    """JSON may hold signs that other readers take for the end of a line."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"tokens": [5], "note": "a\u2028b\u0085c"}\n\n{"tokens": [6]}\n', encoding="utf-8")
    with Engine.load(model, draft="none", backend="torch") as engine:
        assert prompts_from(engine, [str(path)], 9) == [[5], [6]]


def test_a_command_that_failed_can_be_mended(model: str, tmp_path: Path) -> None:
    """A file that is not there does not make the folder a run of its own."""
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join('{"tokens": [5, 6, 7]}' for _ in range(6)) + "\n")
    for name in ("typo.jsonl", "p.jsonl"):
        settings = settings_for(
            model, prompts=(str(tmp_path / name),), num_prompts=6, held_out=0, updates=2, max_tokens=12
        )
        if name == "typo.jsonl":
            with pytest.raises(ConfigError, match="there is no file of prompts"):
                train(settings, tmp_path / "out", device="cpu", say=lambda line: None, report=lambda report: None)
        else:
            assert train(settings, tmp_path / "out", device="cpu", say=lambda _: None, report=lambda _: None) is None
    assert open_head(tmp_path / "out").made_for == model


def test_a_model_that_no_head_can_sit_on(tmp_path: Path) -> None:
    """It is told before anything is answered."""
    SHAPES["tiny-flat"] = build_shape("llama", 2, 32, (4, 2, 8), 48, SIZE, context=256)
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"reads three layers apart, and .* has 2; take one with 7 or more"):
        train(settings_for("random:tiny-flat"), tmp_path, say=said.append, report=lambda report: None, device="cpu")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; name a folder for the head"):
        train(settings_for("random:tiny-flat"), tmp_path / "file", say=said.append, report=lambda report: None)
    assert not said


def test_the_tokens_said_most_often(model: str) -> None:
    texts = Texts([[1, 2, 9, 9, 9, 4, 4], [5, 9, 7, 4]], [2, 1])
    assert most_said(texts, 2, 20) == [4, 9]
    assert most_said(texts, None, 20) is None and most_said(texts, 20, 20) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file of prompts"),
        ("\n\n", "the files hold no prompts"),
        ('{"nothing": 1}\n', "line 1: wanted a text, or an object with one of messages"),
        ("{\n", "line 1: wanted a text, or an object with one of messages"),
        ('{"tokens": [1, 2]}\n{"prompt": 5}\n', "line 2: wanted a text"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: wanted a text"),
        ('{"tokens": [1, "a"]}\n', "line 1: wanted a text"),
        ("[]\n", "line 1: wanted a text"),
    ],
)
def test_prompts_that_cannot_be_read(model: str, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    with Engine.load(model, draft="none", backend="torch") as engine, pytest.raises(ConfigError, match=message):
        prompts_from(engine, [str(path)], 5)


@pytest.mark.parametrize("changes", [{"updates": 0}, {"length": 5}, {"vocabulary": 0}, {"held_out": 40}, {"steps": 0}])
def test_settings_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        settings_for("x", **changes)


def test_a_gpu_backend_gives_the_same_features(model: str, texts: Texts) -> None:
    """By the twins of its kernels."""
    name = model.removeprefix("random:")
    torchs = TransformerBackend(RandomFile(name), Pages(64, 4))
    gpus = GpuBackend(RandomFile(name), Pages(64, 4), device="cpu", dtype=torch.float32)
    some = [texts.tokens[0][:17], texts.tokens[1][:30], texts.tokens[2][:9]]
    wanted, found = (Features(target, (2, 3, 4)).of(some, [6, 6, 6]) for target in (torchs, gpus))
    assert wanted.tokens.shape == (3, 65) and wanted.counts == [17, 30, 9], "filled up to 64 entries"
    assert torch.equal(wanted.tokens, found.tokens) and torch.allclose(wanted.states, found.states, atol=1e-4)
    real = wanted.tokens[:, :9]
    for target, batch in ((torchs, wanted), (gpus, found)):
        said = target.unembed(batch.states[:, :9, -32:].flatten(0, 1)).argmax(-1).view(3, 9)
        assert torch.equal(said, (real + 1) % SIZE), "it counts"


def test_states_of_texts_are_held_where_there_is_room(model: str, texts: Texts) -> None:
    target = TransformerBackend(RandomFile(model.removeprefix("random:")), Pages(64, 4))
    features, passes = Features(target, (2, 3, 4), 2), list[int]()
    score = target.score
    target.score = lambda *given: passes.append(len(given[0].slots)) or score(*given)  # type: ignore[method-assign, func-returns-value]
    some = texts.tokens[:3]
    first = features.of(some[:2], [6, 6], [7, 8])
    assert torch.equal(features.of(some[:2], [6, 6], [7, 8]).states, first.states) and passes == [2, 2]
    features._room = 2 * first.states.numel() * 4
    for numbers, fed in (([7, 8], 2), ([7, 8], None), ([8, 9], 1)):
        passes.clear()
        batch = features.of([some[number - 7] for number in numbers], [6, 6], numbers)
        assert passes == ([] if fed is None else [fed])
        assert torch.allclose(
            batch.states[:, :30],
            Features(target, (2, 3, 4), 2).of([some[number - 7] for number in numbers], [6, 6]).states[:, :30],
            atol=1e-5,
        )


def test_every_text_comes_once_before_one_comes_again() -> None:
    lengths = np.random.default_rng(0).integers(10, 300, 200).tolist()
    batches = list(plan(lengths, 1000, 5, 0, 200))
    epoch = next(size for size in range(1, 200) if len({one for batch in batches[:size] for one in batch}) == 200)
    assert sorted(one for batch in batches[:epoch] for one in batch) == list(range(200))
    assert all(len(batch) * max(lengths[one] for one in batch) <= 1000 or len(batch) == 1 for batch in batches)
    filled = sum(len(batch) * max(lengths[one] for one in batch) for batch in batches[:epoch])
    assert filled < 1.1 * sum(lengths), "texts of one length come together"
    assert list(plan(lengths, 1000, 5, 130, 200)) == batches[130:], "also when it goes on there"
    assert list(plan(lengths, 1000, 6, 0, 9)) != batches[:9]


def test_what_guesses_missed_and_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "AT_ONCE", 3 * 11)  # in parts of three rows
    torch.manual_seed(0)
    guesses, matrix = torch.randn(8, 5, requires_grad=True), torch.randn(11, 5)
    states = torch.randn(8, 5)
    wanted = (states @ matrix.t()).softmax(-1)
    weights = torch.rand(8)
    missed, guessed = distance.missed_by(guesses, distance.pull_of(states, matrix), matrix, weights)
    (gradient,) = torch.autograd.grad(0.5 * missed, guesses)
    plain = (weights * torch.nn.functional.cross_entropy(guesses @ matrix.t(), wanted, reduction="none")).sum()
    assert torch.allclose(missed, plain)
    assert guessed.tolist() == (guesses @ matrix.t()).argmax(-1).tolist()
    half = 0.5 * wanted + 0.5 * torch.nn.functional.one_hot(wanted.argmax(-1), 11)
    assert torch.allclose(distance.pull_of(states, matrix, 0.5), half @ matrix, atol=1e-5)
    assert torch.allclose(gradient, torch.autograd.grad(0.5 * plain, guesses)[0], atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # torch's Muon says that this CPU has no bf16
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (24, 24)])
def test_steps_are_those_of_torchs_muon(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    muon = Muon([ours])
    known = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        muon.step(0.01)
        known.step()
    assert (ours - theirs).norm() < 0.02 * theirs.norm()  # halves in theirs
