"""Mamba against transformers' own: the same rows however the tokens come, exact rewinds, exact speculation."""

from __future__ import annotations

import pickle
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.backends import mamba
from outrider.backends.base import Spans
from outrider.backends.mamba import MambaBackend
from outrider.backends.mock import MockBackend
from outrider.config import MockConfig
from outrider.errors import BackendError, ConfigError, ModelFileError
from outrider.models.base import MambaSpec
from outrider.models.folder import FolderFile
from outrider.models.gguf import GGUFFile

from slot_machine import answers, error, feed, machine, reference
from tiny import gguf_tensors, save_folder, save_gguf, tiny

LIMIT = 1e-4
VOCAB = 101
TEXT = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 60)]


@cache
def model(seed: int = 0, drift: float = 0.0) -> Any:
    """`drift` makes another one that agrees with it most of the time."""
    made = tiny("mamba", seed=seed)
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(1.0 + drift * torch.randn(weight.shape, generator=generator))
    return made


def file_of(made: Any, **changes: Any) -> Any:
    """The model as a file, without one."""
    config, tensors = made.config, gguf_tensors(made)
    spec = {
        "family": "mamba",
        "num_layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "inner": config.intermediate_size,
        "state": config.state_size,
        "conv": config.conv_kernel,
        "dt_rank": config.time_step_rank,
        "num_columns": config.vocab_size,
        "context": 128,
        "norm_eps": config.layer_norm_epsilon,
        "tied": config.tie_word_embeddings,
    }
    return SimpleNamespace(
        path=Path("tiny"),
        spec=MambaSpec(**{**spec, **changes}),
        name="tiny",
        eos_ids=(2,),
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        read=tensors.__getitem__,
    )


def backend(made: Any = None, **settings: Any) -> MambaBackend:
    return MambaBackend(file_of(made or model()), **settings)


def newest(target: MambaBackend, slot: Any) -> list[np.ndarray]:
    """The recurrent state at the present length: the convolution's window and the state of every layer."""
    saved = target.save(slot)
    return [saved["inputs"][:, saved["inputs"].shape[1] - (target.spec.conv - 1) :], saved["states"][:, -1]]


@pytest.mark.parametrize("pieces", [[60], [1] * 60, [7, 1, 33, 2, 17], [20, 20, 20], [1, 59]], ids=str)
def test_rows_are_transformers_own(pieces: list[int]) -> None:
    ours, rows, begin = backend(), [], 0
    slot = ours.open()
    for count in pieces:
        rows.append(feed(ours, (slot, TEXT[begin : begin + count], count)).logits)
        begin += count
    assert error(np.concatenate(rows), reference(model(), TEXT)) < LIMIT


@pytest.mark.parametrize("changes", [{"conv_kernel": 2}, {"conv_kernel": 1}, {"tie_word_embeddings": False}], ids=str)
def test_other_shapes(changes: dict[str, Any]) -> None:
    made = tiny("mamba", **changes)
    ours = backend(made)
    slot = ours.open()
    feed(ours, (slot, TEXT[:9], 0))
    feed(ours, (slot, [1, 2], 0))
    ours.rewind(slot, 9)
    assert error(feed(ours, (slot, TEXT[9:20], 11)).logits, reference(made, TEXT[:20])[9:]) < LIMIT


@pytest.mark.parametrize("block", [1, 7, 64])
def test_the_scan_may_be_cut_anywhere(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba, "SCAN_TOKENS", block)
    ours = backend(max_rewind=20)
    slot = ours.open()
    feed(ours, (slot, TEXT[:40], 0))
    ours.rewind(slot, 21)
    assert error(feed(ours, (slot, TEXT[21:], 5)).logits, reference(model(), TEXT)[-5:]) < LIMIT


def test_from_files(tmp_path: Path) -> None:
    folder = FolderFile(save_folder(model(), tmp_path / "folder"))
    gguf = GGUFFile(save_gguf(model(), tmp_path / "tiny.gguf"))
    for file in (folder, gguf):
        ours = MambaBackend(file)
        assert ours.info.context == 2**20 and ours.info.max_rewind == 8 and not ours.info.trees
        assert error(feed(ours, (ours.open(), TEXT, 60)).logits, reference(model(), TEXT)) < LIMIT


def test_only_wanted_rows_in_the_order_of_the_slots() -> None:
    """Spans of different lengths, out of order, some without rows, and one longer than everything that is kept."""
    ours = backend()
    slots = [ours.open() for _ in range(5)]
    feed(ours, (slots[3], TEXT[:5], 0), (slots[0], TEXT[5:7], 0))
    spans = [(slots[0], TEXT[7:12], 2), (slots[1], TEXT[:1], 1), (slots[2], TEXT[:50], 0)]
    spans += [(slots[3], TEXT[5:8], 3), (slots[4], TEXT[20:25], 1)]
    scores = feed(ours, *spans)
    assert scores.counts == [2, 1, 3, 1]
    wanted = [reference(model(), TEXT[5:12])[-2:], reference(model(), TEXT[:1]), reference(model(), TEXT[:8])[-3:]]
    wanted.append(reference(model(), TEXT[20:25])[-1:])
    assert error(scores.logits, np.concatenate(wanted)) < LIMIT
    nothing = feed(ours, (slots[1], [1, 2], 0))
    assert nothing.counts == [] and nothing.logits.shape == (0, VOCAB)


@pytest.mark.parametrize("drafted", range(1, 9))
def test_a_refused_draft_leaves_no_trace(drafted: int) -> None:
    """Bit for bit: the state after rewind is the state before, and so is everything that follows."""
    ours = backend()
    slot, other = ours.open(), ours.open()
    feed(ours, (slot, TEXT[:11], 1), (other, TEXT[:3], 1))
    twin, before = ours.fork(slot), newest(ours, slot)
    feed(ours, (slot, TEXT[30 : 30 + drafted], drafted), (other, TEXT[3:6], 3))
    ours.keep([other, slot], [4, 11])
    assert ours.length(slot) == 11 and ours.length(other) == 4
    assert all(map(np.array_equal, newest(ours, slot), before))
    straight, back = (feed(ours, (one, TEXT[11:14], 3)).logits for one in (twin, slot))
    assert np.array_equal(straight, back)
    assert error(back, reference(model(), TEXT[:14])[-3:]) < LIMIT
    assert error(feed(ours, (other, TEXT[4:8], 1)).logits, reference(model(), TEXT[:8])[-1:]) < LIMIT


def test_rewinding_token_by_token_and_back_to_nothing() -> None:
    ours = backend(max_rewind=4)
    slot = ours.open()
    for token in TEXT[:10]:
        feed(ours, (slot, [token], 0))
    for length in (9, 8, 7, 6):
        ours.rewind(slot, length)
        check = ours.fork(slot)
        assert error(feed(ours, (check, [1], 1)).logits, reference(model(), [*TEXT[:length], 1])[-1:]) < LIMIT
        ours.close(check)
    with pytest.raises(BackendError, match="slot 0 cannot rewind 1 tokens to 5; it goes back to 6"):
        ours.rewind(slot, 5)
    short = ours.open()
    feed(ours, (short, TEXT[:4], 0))
    ours.rewind(short, 0)
    assert error(feed(ours, (short, TEXT[20:25], 5)).logits, reference(model(), TEXT[20:25])) < LIMIT


@pytest.mark.parametrize("count", [3, 4])
def test_a_pass_that_fails_corrupts_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it may have overwritten is given up: older states, and with more tokens than are kept the present one."""
    ours = backend(max_rewind=3)
    slot, project, calls = ours.open(), ours._project, iter(range(100))
    feed(ours, (slot, TEXT[:10], 0))

    def fails(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        assert next(calls) < 10, "out of memory"
        return project(x, matrix)

    monkeypatch.setattr(ours, "_project", fails)
    with pytest.raises(AssertionError, match="out of memory"):
        feed(ours, (slot, TEXT[10 : 10 + count], 1))
    monkeypatch.undo()
    if count == 3:
        with pytest.raises(BackendError, match="cannot rewind 2 tokens to 8; it goes back to 10"):
            ours.rewind(slot, 8)
        ours.rewind(slot, 10)
        assert error(feed(ours, (slot, TEXT[10:12], 2)).logits, reference(model(), TEXT[:12])[10:]) < LIMIT
    else:
        for call in (ours.fork, ours.save, lambda one: ours.rewind(one, 10), lambda one: feed(ours, (one, [1], 1))):
            with pytest.raises(BackendError, match="slot 0 lost its state in a pass that failed"):
                call(slot)
    ours.close(slot)


def test_forks_go_separate_ways() -> None:
    ours = backend()
    slot = ours.open()
    feed(ours, (slot, TEXT[:6], 0))
    other = ours.fork(slot)
    scores = feed(ours, (slot, [1, 2], 2), (other, [3, 4], 2))
    wanted = [reference(model(), [*TEXT[:6], *more])[-2:] for more in ([1, 2], [3, 4])]
    assert error(scores.logits, np.concatenate(wanted)) < LIMIT
    ours.rewind(other, 5)
    assert error(feed(ours, (other, [9], 1)).logits, reference(model(), [*TEXT[:5], 9])[-1:]) < LIMIT


@pytest.mark.parametrize("max_rewind", [8, 3, 12])
def test_saved_states_move_between_backends(max_rewind: int) -> None:
    ours, theirs = backend(), backend(max_rewind=max_rewind)
    slot = ours.open()
    feed(ours, (slot, TEXT[:20], 0))
    state = pickle.loads(pickle.dumps(ours.save(slot)))
    assert {type(value) for value in state.values()} == {int, np.ndarray}
    copy = theirs.load(state)
    assert theirs.length(copy) == 20 and all(map(np.array_equal, newest(theirs, copy), newest(ours, slot)))
    least = 20 - min(8, max_rewind)
    theirs.rewind(copy, least)
    wanted = reference(model(), [*TEXT[:least], 7])[-1:]
    assert error(feed(theirs, (copy, [7], 1)).logits, wanted) < LIMIT
    fresh = theirs.load(ours.save(ours.open()))
    assert error(feed(theirs, (fresh, [7], 1)).logits, reference(model(), [7])) < LIMIT
    with pytest.raises(BackendError, match="20 tokens has shapes"):
        theirs.load({**state, "states": state["states"][:2]})


def test_places_are_used_again_and_shortage_is_a_value() -> None:
    ours = backend(max_slots=6)
    slots = [ours.open() for _ in range(6)]
    feed(ours, *[(slot, TEXT[:3], 0) for slot in slots])
    assert ours.open() is None and ours.fork(slots[0]) is None and ours.load(ours.save(slots[0])) is None
    ours.close(slots[2])
    again = ours.open()
    assert again not in slots and ours.num_slots == 6
    assert error(feed(ours, (again, TEXT[:3], 3)).logits, reference(model(), TEXT[:3])) < LIMIT


def test_hidden_states() -> None:
    ours = backend()
    slots = [ours.open(), ours.open()]
    scores = feed(ours, (slots[0], TEXT[:5], 1), (slots[1], TEXT[5:7], 1), hidden=(0, 1, 3))
    assert sorted(scores.hidden) == [0, 1, 3] and ours.info.num_hidden == 4
    with torch.inference_mode():
        parts = [torch.tensor([TEXT[:5]]), torch.tensor([TEXT[5:7]])]
        theirs = [model()(part, use_cache=False, output_hidden_states=True).hidden_states for part in parts]
        embedded = torch.cat([model().backbone.embeddings(part)[0] for part in parts])
    assert np.array_equal(scores.hidden[0], embedded.numpy())
    for index in (1, 3):  # transformers' Mamba has no entry for the embedding
        assert error(scores.hidden[index], torch.cat([states[index - 1][0] for states in theirs]).numpy()) < LIMIT


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"starts": [2]}, "slot 0 holds 3 tokens but was fed position 2"),
        ({"tokens": np.array([5, 101])}, "token 101 is not in a vocabulary of 101"),
        ({"tokens": np.array([-1, 5])}, "token -1 is not in a vocabulary of 101"),
        ({"counts": [126], "tokens": np.zeros(126, int)}, "slot 0 would hold 129 tokens in a context of 128"),
        ({"slots": [9]}, "there is no slot 9; 1 of 64 are open"),
        ({"parents": {0: [-1, -1]}}, "tiny reads chains only; spans [0] are trees"),
        ({"rows": [3]}, "slot 0 is fed 2 tokens, but 3 rows are wanted"),
        ({"counts": [1]}, "spans name 1 tokens, 2 were given"),
    ],
)
def test_passes_that_are_refused(change: dict[str, Any], said: str) -> None:
    ours = backend()
    slot = ours.open()
    feed(ours, (slot, TEXT[:3], 0))
    before = newest(ours, slot)
    given = {"slots": [slot], "starts": [3], "counts": [2], "rows": [1], "tokens": np.array([5, 6]), **change}
    with pytest.raises(BackendError, match=f"^{re.escape(said)}$"):
        ours.score(Spans(**given))
    assert ours.length(slot) == 3 and all(map(np.array_equal, newest(ours, slot), before))


def test_other_refusals() -> None:
    ours = backend()
    slot = ours.open()
    with pytest.raises(BackendError, match="offers 4 hidden states; 4 was asked for"):
        feed(ours, (slot, [1], 1), hidden=(4,))
    with pytest.raises(BackendError, match="holds 0 tokens and cannot go to 1"):
        ours.rewind(slot, 1)
    with pytest.raises(BackendError, match="tiny reads chains only; paths were given for slots"):
        ours.keep([slot], [0], {slot: [0]})
    with pytest.raises(BackendError, match="a pass without spans"):
        feed(ours)
    for call in (ours.length, ours.fork, ours.close, ours.save, lambda gone: ours.rewind(gone, 0)):
        with pytest.raises(BackendError, match="there is no slot 7"):
            call(7)
    with pytest.raises(ConfigError, match="max_rewind must be at least 0, got -1"):
        backend(max_rewind=-1)
    with pytest.raises(ModelFileError, match=r"token_embd.weight has shape \[101, 64\], the model needs \[101, 32\]"):
        MambaBackend(file_of(model(), width=32))
    with pytest.raises(ModelFileError, match="tiny is a llama model; this backend runs Mamba"):
        MambaBackend(SimpleNamespace(path=Path("tiny"), spec=SimpleNamespace(family="llama")))


TestSlots = machine(backend, model(), max_rewind=8)
TestShortRewinds = machine(lambda: backend(max_rewind=2, vocab_size=VOCAB), model(), max_rewind=2, runs=4)


@cache
def said_plainly(rule: str) -> list[list[int]]:
    return answers(backend(), rule).tokens


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("draft", ["near", "far", "ngram", "mock"])
def test_speculation_says_what_plain_decoding_says(rule: str, draft: str) -> None:
    drafts: dict[str, Any] = {
        "near": lambda: backend(model(drift=0.03)),
        "far": lambda: backend(model(seed=1), max_rewind=3),
        "ngram": lambda: "ngram",
        "mock": lambda: MockBackend(MockConfig(vocab_size=VOCAB, seed=1)),
    }
    plain = said_plainly(rule)
    for width, chunk in ((1, 512), (4, 4), (12, 512))[1 if draft in ("far", "mock") else 0 :]:
        given = drafts[draft]()
        spec = answers(backend(), rule, draft=given, width=width, prefill_chunk=chunk)
        assert spec.tokens == plain
        assert given == "ngram" or given.num_slots == 0
        if draft == "near":
            assert spec.statistics.accepted > spec.statistics.rejected
        assert width < 12 or any("rewind only 8" in why for why in spec.statistics.fallbacks)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_as_the_draft_of_another_model(rule: str) -> None:
    target = MockConfig(vocab_size=VOCAB, seed=5)
    plain = answers(MockBackend(target), rule)
    spec = answers(MockBackend(target), rule, draft=backend(), width=5)
    assert spec.tokens == plain.tokens and spec.statistics.drafted > 0
