"""Drafts of another vocabulary: translation, projected rows, re-encoded text. The law, identity and caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.backends.base import Spans
from outrider.backends.mock import MockBackend
from outrider.config import MockConfig
from outrider.draft.model import ModelDrafter
from outrider.draft.reencode import ReencodeDrafter
from outrider.draft.vocab import (
    SPARE,
    TranslatedBackend,
    TranslatedDrafter,
    Translation,
    Vocabulary,
    end_reason,
    past_reason,
    split_text,
)
from outrider.engine.engine import Engine
from outrider.errors import BackendError, ConfigError, DraftError, VocabularyError
from outrider.sampling import accept
from outrider.sampling.ops import SamplingOps
from outrider.tokenizer.base import PieceTokenizer
from outrider.tokenizer.build import tokenizer_from_metadata
from outrider.types import Request, Result, SamplingParams, Scores, Slot

from cases import CONTROLS, LENGTH, PROMPT, TARGET
from oracle import SIGNIFICANCE, joint_law, law_p_value

Patch = pytest.MonkeyPatch
OURS = [b"a", b"b", b"ab", b"c"]  # the target's tokens, of the size that the law is enumerated for
THEIRS = [b"x", b"c", b"a", b"bc", b"b"]  # "ab" is missing, "x" and "bc" are extra, the order is another
DRAFT = MockConfig(vocab_size=len(THEIRS), seed=2, sharpness=1.3)
GENERATIONS = 8_000  # the mutations below are seen with 1,000 to 2,000
MANY = 50_000


def translate(ours: Sequence[bytes], theirs: Sequence[bytes]) -> Translation:
    return Translation.of(PieceTokenizer(ours), PieceTokenizer(theirs))


def drafter_of(kind: str, draft: MockBackend, translation: Translation, chunk: int = 512) -> Any:
    if kind == "text":
        return ReencodeDrafter(draft, translation, chunk=chunk)
    backend = TranslatedBackend(draft, translation)
    return ModelDrafter(backend, chunk=chunk) if kind == "plain" else TranslatedDrafter(backend, chunk=chunk)


# ---- after every step: what the draft holds stands for what was emitted ------------------------------------------


def check_draft(engine: Engine) -> None:
    running = {job.id: job for job in engine.loop.scheduler.running}
    for drafter in engine.loop.router.drafters.values():
        seats = getattr(drafter, "seats", {})
        assert seats.keys() <= running.keys(), "the draft holds slots of jobs that are over"
        for job_id, seat in seats.items():
            tokens = running[job_id].tokens
            if isinstance(drafter, ReencodeDrafter):
                check_text(drafter, seat, tokens)
            else:
                backend = drafter.backend
                assert backend.num_slots == len(seats) == backend.draft.num_slots
                assert backend.length(seat.slot) == seat.length
                readings = backend.translation.read(tokens[: seat.length], 0)
                assert backend.draft.cached(seat.slot) == list(chain.from_iterable(readings))


def check_text(drafter: ReencodeDrafter, seat: Any, tokens: Sequence[int]) -> None:
    """Cache, rest and unread tokens are the emitted text, where the draft can spell any part of it."""
    ours, theirs = drafter.translation.target.pieces, drafter.translation.draft
    held = drafter.backend.cached(seat.slot)
    assert len(held) == seat.length and not seat.ahead
    assert drafter.backend.num_slots == len(drafter.seats)
    text = b"".join(ours[token] for token in tokens)
    rest = seat.rest + b"".join(ours[token] for token in tokens[seat.read :])
    assert text.endswith(rest) and (seat.rest or seat.read < len(tokens)), "nothing is left to read: no row comes"
    if all(bytes([byte]) in theirs.ids for byte in text):
        assert b"".join(theirs.pieces[token] for token in held) + rest == text


@pytest.fixture(autouse=True)
def drafts_agree(request: pytest.FixtureRequest, caches_agree: None, monkeypatch: Patch) -> None:
    if request.node.get_closest_marker("blind"):
        return
    step = Engine.step

    def checked(engine: Engine) -> Any:
        events = step(engine)
        check_draft(engine)
        return events

    monkeypatch.setattr(Engine, "step", checked)


# ---- the translation ---------------------------------------------------------------------------------------------


def test_tokens_that_mean_the_same_bytes_are_shared() -> None:
    translation = translate(OURS, THEIRS)
    assert translation.shared == {0: 2, 1: 4, 3: 1}
    assert translation.num_shared == 3 and translation.share == 0.75
    assert [translation.reading(token) for token in range(4)] == [(2,), (4,), (2, 4), (1,)]


@given(
    ours=st.lists(st.binary(min_size=0, max_size=3), min_size=1, max_size=12),
    theirs=st.lists(st.binary(min_size=0, max_size=2), min_size=1, max_size=12),
)
def test_any_two_vocabularies(ours: list[bytes], theirs: list[bytes]) -> None:
    """Pieces may be anything, and come twice: sharing is one to one, reading never fails and never says nothing."""
    translation = Translation(Vocabulary(ours), Vocabulary(theirs))
    assert len(set(translation.shared.values())) == translation.num_shared
    for token, other in translation.shared.items():
        assert ours[token] == theirs[other] != b""
        assert token == ours.index(ours[token]) and other == theirs.index(theirs[other])
    assert {ours[token] for token in translation.shared} == (set(ours) & set(theirs)) - {b""}
    for token, piece in enumerate(ours):
        reading = translation.reading(token)
        assert reading and all(0 <= other < len(theirs) for other in reading)
        if piece and all(bytes([byte]) in theirs for byte in piece):
            assert b"".join(theirs[other] for other in reading) == piece


def test_special_tokens_are_shared_by_name_and_by_role() -> None:
    ours = Vocabulary([b"a", b"", b"", b"", b"", b""], specials={"<s>": 1, "</s>": 2, "<ab>": 3}, bos_id=1, eos_id=2)
    theirs = Vocabulary([b"b", b"", b"a", b"", b""], specials={"<end>": 1, "<s>": 3}, bos_id=3, eos_id=1)
    translation = Translation(ours, theirs)
    assert translation.shared == {0: 2, 1: 3, 2: 1}
    assert translation.reading(3) == (2, 0)  # no counterpart: what can be read of its name
    assert translation.reading(4) == translation.reading(5) == (0,)  # nothing at all can be said about these
    other = Translation(ours, Vocabulary([b"a", b"", b"?"], specials={"<unk>": 1}))
    assert other.reading(2) == (1,)
    swapped = Vocabulary([b"", b"", b"a"], specials={"</s>": 0, "<s>": 1}, bos_id=0, eos_id=1)
    assert Translation(ours, swapped).shared == {0: 2, 1: 1, 2: 0}  # names go before roles


def test_of_tokens_with_the_same_bytes_the_lowest_id_speaks() -> None:
    vocabulary = Vocabulary([b"z", b"a", b"a", b"a"], spare={1})
    assert vocabulary.ids[b"a"] == 2
    translation = Translation(vocabulary, Vocabulary([b"a", b"a"]))
    assert translation.shared == {2: 0}
    assert translation.reading(1) == translation.reading(3) == (0,)  # read alike, but never drafted


def test_bytes_are_spelled_with_the_fewest_tokens_where_the_tokenizer_cannot() -> None:
    vocabulary = Vocabulary([b"a", b"ab", b"bcd", b"b", b"\xc3", b"\xa9"])
    assert vocabulary.spell(b"abcd") == [0, 2]
    assert vocabulary.spell(b"abzb") == [1, 3]  # nothing has a z
    assert vocabulary.spell("éa".encode()) == [4, 5, 0]
    assert vocabulary.spell(b"\xa9a\xc3") == [5, 0, 4]
    assert vocabulary.spell(b"") == []
    upper = Vocabulary.of(PieceTokenizer([b"a", b"b", b"ab", b" "]))
    text = b"ab a" * 20
    odd = text + b"z" + text
    assert upper.spell(odd) == upper.spell(text) * 2  # the odd letter is left out, the others read as ever


def test_halves_of_characters_are_split_off() -> None:
    assert split_text("né".encode()) == (b"", "né", b"")
    assert split_text(b"\xa9n\xc3") == (b"\xa9", "n", b"\xc3")
    assert split_text(b"\x80\x80\x80\x80a") == (b"\x80\x80\x80", "", b"\x80a")
    assert split_text(b"") == (b"", "", b"")


LETTERS = [*map(chr, range(0x21, 0x7F)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x144))]


def byte_level() -> Any:
    """A small byte-level tokenizer, as GPT-2's."""
    merged = [("i", "d"), ("Ġ", "r"), ("Ġr", "id"), ("e", "r"), ("Ġrid", "er")]
    tokens = [*LETTERS, *("".join(pair) for pair in merged), "<|end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merged],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    return tokenizer_from_metadata(metadata, Path("bytes.gguf"))


def sentence_piece() -> Any:
    """A small SentencePiece tokenizer, as Llama's: it puts a space before a text, and a BOS before that."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abdeir", "▁r", "id", "▁rid"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(at) for at in range(len(pieces) - 259, 0, -1)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return tokenizer_from_metadata(metadata, Path("pieces.gguf"))


def test_real_tokenizers() -> None:
    ours, theirs = byte_level(), sentence_piece()
    translation = Translation.of(ours, theirs)
    draft = translation.draft
    spelled = {ours.piece(token): [theirs.piece(other) for other in translation.reading(token)] for token in range(262)}
    assert spelled["a"] == ["a"] and spelled["z"] == ["<0x7A>"]  # letters before bytes
    assert spelled["Ġrid"] == ["▁rid"] and spelled["Ġrider"] == ["▁rid", "e", "r"]
    assert spelled["er"] == ["e", "r"]  # without the space that begins a text
    assert spelled["<|end|>"] == ["</s>"]
    assert draft.opening == (1,)
    assert translation.read(ours.encode(" rid"), 0)[0] == (1, *translation.reading(ours.encode(" rid")[0]))
    assert translation.read(ours.encode(" rid"), 5)[0] == translation.reading(ours.encode(" rid")[0])
    back = Translation.of(theirs, ours)
    assert back.draft.opening == () and back.shared[2] == ours.eos_id
    assert [ours.piece(t) for t in back.reading(3 + 0xE9)] == ["é"]  # half a character, in letters of GPT-2's
    twice = Translation.of(theirs, theirs)
    assert twice.read([1, 2], 0) == [(1,), (2,)]  # a BOS is there already
    assert twice.num_shared == theirs.vocab_size - len("abdeir ")  # the letters' byte tokens stand back


def test_sizes_of_models_that_differ_from_the_tokenizers() -> None:
    assert Translation.of(PieceTokenizer(OURS), PieceTokenizer(THEIRS), target_size=2, draft_size=3).shared == {0: 2}
    assert Vocabulary.of(byte_level(), 300).pieces[299] == b""

    class Own:
        def encode(self, text: str) -> list[int]:
            return [0] * len(text)

        def token_bytes(self, token: int) -> bytes:
            return b"a"

    assert Vocabulary.of(Own(), 1).spell(b"aa") == [0, 0]
    with pytest.raises(ConfigError, match="does not say how many tokens"):
        Vocabulary.of(Own())


def test_what_does_not_fit_is_refused() -> None:
    draft = MockBackend(DRAFT)
    with pytest.raises(VocabularyError, match="for a draft of 2 tokens, mock-2 has 5; build it with draft_size=5"):
        TranslatedBackend(draft, translate(OURS, [b"a", b"b"]))
    with pytest.raises(VocabularyError, match="for a draft of 2 tokens, mock-2 has 5"):
        ReencodeDrafter(draft, translate(OURS, [b"a", b"b"]))
    with pytest.raises(VocabularyError, match="let it draft text instead"):
        TranslatedBackend(draft, translate(OURS, [b"1", b"2", b"3", b"4", b"5"]))
    backend = TranslatedBackend(draft, translate(OURS, THEIRS))
    with pytest.raises(VocabularyError, match="5 tokens and the draft mock-2 has 4"):
        Engine.load(MockBackend(MockConfig(vocab_size=5)), draft=TranslatedDrafter(backend))
    slot = backend.open()
    with pytest.raises(BackendError, match="hidden"):
        backend.score(Spans([slot], [0], [1], [1], np.array([0])), hidden=[0])
    for spans, message in (
        (Spans([slot], [1], [1], [1], np.array([0])), "holds 0 tokens but was fed position 1"),
        (Spans([slot], [0], [1], [2], np.array([0])), "2 rows are wanted"),
        (Spans([slot], [0], [1], [1], np.array([4])), "not in a vocabulary of 4"),
        (Spans([slot], [0], [2], [1], np.array([0])), "name 2 tokens"),
        (Spans([Slot(99)], [0], [1], [1], np.array([0])), "no slot 99"),
    ):
        with pytest.raises(BackendError, match=message):
            backend.score(spans)
    for wrong in (partial(backend.rewind, slot, 1), partial(backend.keep, [slot], [0], {slot: [0]})):
        with pytest.raises(BackendError, match="holds 0 tokens"):
            wrong()
    assert backend.length(slot) == draft.length(slot) == 0


# ---- rows and slots ----------------------------------------------------------------------------------------------


def projected(backend: TranslatedBackend, tokens: Sequence[int]) -> np.ndarray:
    """The row after these tokens, from the definition."""
    translation = backend.translation
    row = backend.draft.logits_after(list(chain.from_iterable(translation.read(tokens, 0))))
    wanted = np.full(translation.target.size, -np.inf, dtype=np.float32)
    for token, other in translation.shared.items():
        wanted[token] = row[other]
    return wanted


def feed(backend: TranslatedBackend, *spans: tuple[Slot, Sequence[int], int], **parents: Any) -> Scores:
    return backend.score(
        Spans(
            slots=[slot for slot, _, _ in spans],
            starts=[backend.length(slot) for slot, _, _ in spans],
            counts=[len(tokens) for _, tokens, _ in spans],
            rows=[rows for _, _, rows in spans],
            tokens=backend.ops.integers([token for _, tokens, _ in spans for token in tokens]),
            **parents,
        )
    )


letters = st.sampled_from([b"a", b"b", b"c", b"ab", b"ca", b"abc", b"\xc3", b"\xa9", "é".encode(), b"\xa9a"])
vocabularies = st.lists(letters, min_size=2, max_size=6, unique=True)


@settings(max_examples=80)
@given(
    arrays=st.sampled_from(["numpy", "numpy", "numpy", "torch"]),
    ours=vocabularies,
    theirs=vocabularies,
    padding=st.integers(0, 2),
    bos=st.booleans(),
    data=st.data(),
)
def test_rows_are_the_drafts_own_through_everything(
    arrays: Any, ours: list[bytes], theirs: list[bytes], padding: int, bos: bool, data: st.DataObject
) -> None:
    """Slots fed, chunked, rewound, kept, forked, saved, loaded and closed at random: every row is compared."""
    theirs = list(dict.fromkeys([*theirs, ours[0]]))
    opening = {"specials": {"<s>": len(theirs)}, "bos_id": len(theirs), "adds_bos": True} if bos else {}
    draft_vocabulary = Vocabulary([*theirs, b""] if bos else theirs, **opening)
    draft = MockBackend(MockConfig(vocab_size=draft_vocabulary.size, padding=padding, seed=4), arrays=arrays)
    backend = TranslatedBackend(draft, Translation(Vocabulary(ours), draft_vocabulary))
    assert backend.info.vocab_size == backend.info.num_columns == len(ours)
    held: dict[Slot, list[int]] = {backend.open(): []}
    actions = ["feed", "feed", "feed", "rewind", "keep", "fork", "save", "open", "close"]
    for action in data.draw(st.lists(st.sampled_from(actions), min_size=3, max_size=12)):
        slot = data.draw(st.sampled_from(sorted(held)))
        if action == "feed":
            tokens = st.lists(st.integers(0, len(ours) - 1), min_size=1, max_size=5)
            spans = [(one, fed := data.draw(tokens), data.draw(st.integers(0, len(fed)))) for one in {slot, min(held)}]
            scores = feed(backend, *spans)
            wanted = []
            for one, fed, rows in spans:
                held[one] += fed
                size = len(held[one])
                wanted += [projected(backend, held[one][: size - rows + 1 + row]) for row in range(rows)]
            assert scores.counts == [rows for _, _, rows in spans if rows]
            assert tuple(scores.logits.shape) == (len(wanted), len(ours))
            assert np.array_equal(np.asarray(scores.logits), np.reshape(wanted, (-1, len(ours))))
        elif action in ("rewind", "keep"):
            length = data.draw(st.integers(0, len(held[slot])))
            backend.rewind(slot, length) if action == "rewind" else backend.keep([slot], [length])
            del held[slot][length:]
        elif action == "fork":
            held[backend.fork(slot)] = list(held[slot])
        elif action == "save":
            state, tokens = backend.save(slot), held.pop(slot)
            backend.close(slot)
            held[backend.load(state)] = tokens
        elif action == "open":
            held[backend.open([0])] = []
        elif len(held) > 1:
            backend.close(slot)
            del held[slot]
        assert backend.num_slots == draft.num_slots == len(held)
        for one, tokens in held.items():
            assert backend.length(one) == len(tokens)
            assert draft.cached(one) == list(chain.from_iterable(backend.translation.read(tokens, 0)))


def test_trees_are_expanded() -> None:
    """Tokens of several draft tokens inside a tree, fed at once or level by level; the kept path is what remains."""
    backend = TranslatedBackend(MockBackend(DRAFT), translate(OURS, THEIRS))
    tokens, parents = [2, 0, 2, 3, 1, 2], [-1, 0, 0, 1, 2, 2]  # 2 is "ab": two tokens of the draft's
    lines = [[2], [2, 0], [2, 2], [2, 0, 3], [2, 2, 1], [2, 2, 2]]
    wanted = np.stack([projected(backend, [2, 1, *line]) for line in lines])
    at_once, by_level = backend.open(), backend.open()
    feed(backend, (at_once, [2, 1], 0), (by_level, [2, 1], 0))
    assert np.array_equal(feed(backend, (at_once, tokens, 6), parents={0: parents}).logits, wanted)
    for start, stop in ((0, 1), (1, 3), (3, 6)):
        level = feed(backend, (by_level, tokens[start:stop], stop - start), parents={0: parents[:stop]})
        assert np.array_equal(level.logits, wanted[start:stop])
    for slot in (at_once, by_level):
        assert backend.length(slot) == 8
        backend.keep([slot], [5], {slot: [2, 4, 7]})
        assert backend.length(slot) == 5
        assert backend.draft.cached(slot) == list(chain.from_iterable(backend.translation.read([2, 1, 2, 2, 2], 0)))
        assert np.array_equal(feed(backend, (slot, [0], 1)).logits[0], projected(backend, [2, 1, 2, 2, 2, 0]))
        backend.rewind(slot, 1)
        assert np.array_equal(feed(backend, (slot, [3], 1)).logits[0], projected(backend, [2, 3]))


class Remembering(MockBackend):
    """Starts every sequence with as much as it can."""

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        self.asked, self.published = (list(tokens), limit, tenant), None
        slot = super().open()
        self._feed(slot, 0, tokens[:-1])
        return slot

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        self.published = list(tokens)


def test_a_beginning_that_the_draft_remembers() -> None:
    draft = Remembering(DRAFT)
    backend = TranslatedBackend(draft, translate(OURS, THEIRS))
    slot = backend.open([0, 1, 2], limit=10, tenant="me")
    assert draft.asked[0] == [2, 4, 2, 4] and draft.asked[2] == "me"
    assert draft.asked[1] >= 4 + 7
    assert backend.length(slot) == 2 and draft.cached(slot) == [2, 4]  # half a token was known: not kept
    assert np.array_equal(feed(backend, (slot, [2], 1)).logits[0], projected(backend, [0, 1, 2]))
    backend.publish(slot, [0, 2])
    assert draft.published == [2, 2, 4]


def test_room_is_counted_in_the_drafts_tokens() -> None:
    draft = MockBackend(replace(DRAFT, context=8))
    backend = TranslatedBackend(draft, translate(OURS, THEIRS))
    assert backend.open([2] * 5) is None and backend.open([0] * 9) is None and draft.num_slots == 0
    slot = backend.open([2, 2])
    assert backend.room(slot) == 8 and backend.room(slot, [2, 2]) == 4 and backend.room(slot, [2] * 5) == -2
    feed(backend, (slot, [2, 0], 0))
    assert backend.room(slot) == 5 and backend.room(slot, [2]) == 3
    full = TranslatedBackend(MockBackend(replace(DRAFT, max_slots=0)), translate(OURS, THEIRS))
    assert full.open() is None


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_a_row_that_says_nothing_about_shared_tokens(arrays: Any) -> None:
    """All shared tokens are alike, then; what is no number stays none."""
    backend = TranslatedBackend(MockBackend(DRAFT, arrays=arrays), translate(OURS, THEIRS))
    inf, nan = np.inf, np.nan
    rows = np.array([[0.0, -inf, -inf, 1.0, -inf], [0.0, 1.0, 2.0, 3.0, 4.0], [nan] * 5], dtype=np.float32)
    shown = np.asarray(backend._project(backend.ops.xp.asarray(rows)))
    expected = np.array([[0, 0, -inf, 0], [2, 4, -inf, 1], [nan, nan, -inf, nan]], dtype=np.float32)
    assert np.array_equal(shown, expected, equal_nan=True)


# ---- the law and identity ----------------------------------------------------------------------------------------


def measure(
    kind: str,
    *,
    width: int = 3,
    count: int = GENERATIONS,
    controls: dict[str, Any] | None = None,
    arrays: Any = "numpy",
    **shape: Any,
) -> float:
    """p-value of the generations against the enumerated law of the target alone."""
    drafter = drafter_of(kind, MockBackend(DRAFT, arrays=arrays), translate(OURS, THEIRS))
    engine = Engine.load(MockBackend(TARGET), draft=drafter, width=width, max_batch=1000)
    params = SamplingParams(seed=5, accept="rejection", **(controls or {}))
    requests = [
        Request(prompt=PROMPT, sampling=params, max_tokens=LENGTH, choice=choice, **shape) for choice in range(count)
    ]
    outputs = [result.token_ids for result in engine.generate(requests)]
    rate = engine.statistics.acceptance_rate
    assert count <= 2000 or 0.05 < rate < 0.95, f"{rate} of the drafts are kept: not every branch is taken often"
    return law_p_value(outputs, joint_law(MockBackend(TARGET), PROMPT, params, LENGTH))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("shared", {"width": 3}),
        ("text", {"width": 3, "count": 4000}),
        ("shared", {"width": 2, "controls": CONTROLS["together"], "arrays": "torch", "count": 2000}),
        pytest.param("plain", {"width": 1, "count": MANY}, marks=pytest.mark.slow),
        pytest.param("shared", {"width": 5, "count": MANY}, marks=pytest.mark.slow),
        pytest.param("shared", {"width": 5, "tree": True, "count": MANY}, marks=pytest.mark.slow),
        pytest.param("text", {"width": 5, "count": MANY}, marks=pytest.mark.slow),
        pytest.param("text", {"width": 2, "controls": CONTROLS["together"], "count": MANY}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.blind
def test_joint_law(kind: str, settings: dict[str, Any]) -> None:
    assert measure(kind, **settings) > SIGNIFICANCE


def not_renormalised(patch: Patch) -> None:
    """q is what the draft gave the token among all of its own."""
    project, draft = TranslatedBackend._project, SamplingOps.draft
    shares: list[np.ndarray] = []

    def weigh(self: TranslatedBackend, logits: Any) -> Any:
        rows = project(self, logits)
        shares[:] = [np.exp(rows).sum(-1, keepdims=True) / np.exp(logits).sum(-1, keepdims=True)]
        return rows

    def report(self: SamplingOps, *args: Any) -> Any:
        drawn = draft(self, *args)
        return drawn._replace(probs=drawn.probs * shares[0])

    patch.setattr(TranslatedBackend, "_project", weigh)
    patch.setattr(SamplingOps, "draft", report)


def off_by_one(patch: Patch) -> None:
    """The token drawn is the neighbour of the one the row speaks of."""
    draft = SamplingOps.draft

    def neighbour(self: SamplingOps, *args: Any) -> Any:
        drawn = draft(self, *args)
        return drawn._replace(tokens=(drawn.tokens + 1) % len(OURS))

    patch.setattr(SamplingOps, "draft", neighbour)


def one_hot(patch: Patch) -> None:
    """Refused as what it was drawn from says, but replaced as if it had been certain."""
    residual = accept.residual
    patch.setattr(accept, "residual", lambda xp, p, refused, tokens, probs: residual(xp, p, refused, tokens, None))


@pytest.mark.parametrize("mutate", [not_renormalised, off_by_one, one_hot])
def test_the_law_sees_a_wrong_projection(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    monkeypatch.setattr(SamplingOps, "are_distributions", lambda self, probs: [True] * len(probs))
    assert measure("shared", count=2000) < SIGNIFICANCE


def test_rows_that_are_not_renormalised_are_refused_before_that(monkeypatch: Patch) -> None:
    not_renormalised(monkeypatch)
    with pytest.raises(DraftError, match="no distributions"):
        measure("shared", count=1)


def test_a_shifted_projection_keeps_the_law_but_not_the_rows(monkeypatch: Patch) -> None:
    """Any row is exact as long as it is the one that was drawn from: here only the comparison of rows can see it."""
    build = TranslatedBackend.__init__

    def shifted(self: TranslatedBackend, *args: Any) -> None:
        build(self, *args)
        self._columns = np.roll(self._columns, 1)

    monkeypatch.setattr(TranslatedBackend, "__init__", shifted)
    assert measure("shared", count=2000) > SIGNIFICANCE
    with pytest.raises(AssertionError):
        test_trees_are_expanded()


def same(speculative: Result, plain: Result) -> None:
    assert speculative.token_ids == plain.token_ids
    assert speculative.finish_reason == plain.finish_reason


@settings(max_examples=120)
@given(
    kind=st.sampled_from(["shared", "text"]),
    ours=vocabularies,
    theirs=vocabularies,
    width=st.integers(1, 6),
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    rule=st.sampled_from(["coupled", "coupled", "rejection"]),
    tree=st.booleans(),
    context=st.sampled_from([6, 24, 200]),
    max_rewind=st.sampled_from([None, None, None, 0, 2]),
    max_slots=st.sampled_from([None, None, 1, 0]),
    chunk=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_coupled_and_greedy_equal_plain(
    kind: str,
    ours: list[bytes],
    theirs: list[bytes],
    width: int,
    temperature: float,
    rule: str,
    tree: bool,
    context: int,
    max_rewind: int | None,
    max_slots: int | None,
    chunk: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Whatever the vocabularies and however short the draft's context: the target's own tokens, two at a time."""
    theirs = list(dict.fromkeys([*theirs, ours[0]]))
    config = MockConfig(vocab_size=len(theirs), seed=1, context=context, max_rewind=max_rewind, max_slots=max_slots)
    draft = MockBackend(config)
    drafter = drafter_of(kind, draft, translate(ours, theirs), chunk)
    target = MockBackend(MockConfig(vocab_size=len(ours), seed=9))
    engine = Engine.load(target, draft=drafter, width=width, prefill_chunk=5)
    prompts = st.lists(st.integers(0, len(ours) - 1), min_size=1, max_size=12)
    sampling = SamplingParams(seed=seed, temperature=temperature, accept=rule)
    requests = [
        Request(prompt=data.draw(prompts), sampling=sampling, max_tokens=10, choice=choice, tree=tree)
        for choice in range(2)
    ]
    plain = engine.generate([replace(request, width=0, tree=None) for request in requests])
    drafted = engine.generate(requests)
    if rule == "coupled" or temperature == 0.0:
        for one, other in zip(drafted, plain, strict=True):
            same(one, other)
    assert draft.num_slots == target.num_slots == 0
    for result in drafted:
        if result.statistics.drafted == 0 and max_slots == 0:
            assert result.statistics.fallbacks


# ---- what the drafts do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "text"])
def test_a_draft_reads_only_what_is_new(kind: str) -> None:
    """However long the history: so many tokens a round, and one pass per drafted token."""
    draft = MockBackend(DRAFT)
    target = MockBackend(replace(TARGET, context=1000))
    engine = Engine.load(target, draft=drafter_of(kind, draft, translate(OURS, THEIRS), chunk=16), width=3)
    prompt = [0, 1, 2, 3] * 25
    result = engine.generate(prompt, max_tokens=200, seed=3)
    rounds, passes = result.statistics.rounds, draft.num_passes
    assert not result.statistics.fallbacks.keys() - {"the draft is still reading the prompt"}
    assert passes <= 3 * rounds + len(prompt) // 16 + 1
    spelled = 2 * (len(prompt) + 200)  # "ab" takes two
    assert draft.num_tokens_fed <= spelled + 4 * rounds
    assert result.statistics.accepted > 20


@pytest.mark.parametrize("kind", ["shared", "text"])
def test_the_end_of_the_drafts_context_is_told(kind: str) -> None:
    drafter = drafter_of(kind, MockBackend(replace(DRAFT, context=40)), translate(OURS, THEIRS))
    engine = Engine.load(MockBackend(TARGET), draft=drafter, width=3)
    plain = engine.generate([2, 2, 0], max_tokens=60, seed=4, width=0)
    result = engine.generate([2, 2, 0], max_tokens=60, seed=4)
    same(result, plain)
    assert result.statistics.accepted > 0
    past = "the answer is past the 40 tokens of its own that the draft has room for"
    assert result.statistics.fallbacks[past] > 5
    assert sum("comes to the end" in reason for reason in result.statistics.fallbacks) == 1
    long = engine.generate([2] * 30, max_tokens=10, seed=4)
    assert long.statistics.drafted == 0
    assert long.statistics.fallbacks == {past: 9}
    assert not drafter._past


@pytest.mark.parametrize("kind", ["shared", "text"])
def test_a_prompt_that_outgrows_the_draft_while_it_reads(kind: str) -> None:
    """In chunks, with the answer under way; each chunk may be longer than it looks."""
    draft = MockBackend(replace(DRAFT, context=50))
    drafter = drafter_of(kind, draft, translate(OURS, THEIRS), chunk=4)
    engine = Engine.load(MockBackend(TARGET), draft=drafter, width=2, prefill_chunk=64)
    result = engine.generate([0] * 20 + [2] * 14, max_tokens=20, seed=4)
    same(result, engine.generate([0] * 20 + [2] * 14, max_tokens=20, seed=4, width=0))
    assert result.statistics.fallbacks
    assert draft.num_slots == 0


@pytest.mark.parametrize("kind", ["shared", "text"])
def test_an_answer_that_takes_more_room_than_was_kept_for_it(kind: str) -> None:
    """Tokens of eight letters each, for a draft that has letters only: far from the average that room is kept for."""
    draft = MockBackend(MockConfig(vocab_size=8, seed=2, context=1000))
    ours = [b"abcdefgh", b"bcdefgha", b"a"]
    drafter = drafter_of(kind, draft, translate(ours, [bytes([letter]) for letter in b"abcdefgh"]))
    engine = Engine.load(MockBackend(replace(TARGET, vocab_size=3)), draft=drafter, width=2)
    result = engine.generate([0, 1], max_tokens=40, seed=4)
    same(result, engine.generate([0, 1], max_tokens=40, seed=4, width=0))
    if kind == "shared":  # it gets another seat with more room
        assert not result.statistics.fallbacks.keys() - {end_reason(limit) for limit in range(1000)}
    else:
        assert past_reason(2 * 42 + SPARE) in result.statistics.fallbacks
    assert draft.num_slots == 0


class Writer(MockBackend):
    """Writes a text of its own tokens, whatever it reads: `script[n]` after n tokens."""

    def __init__(self, config: MockConfig, script: Sequence[int], value: float = 9.0) -> None:
        super().__init__(config)
        self.script, self.value = script, value

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        scores = super().score(spans, hidden)
        logits = np.zeros_like(scores.logits)
        asked = [slot for slot, rows in zip(spans.slots, spans.rows, strict=True) if rows]
        for row, slot in enumerate(asked):
            logits[row, self.script[self.length(slot)]] = self.value
        return Scores(scores.counts, logits)


def first_drafts(
    ours: Vocabulary, theirs: Vocabulary, script: Sequence[int], width: int, prompt: Sequence[int] = (0,), **config: Any
) -> list[int]:
    """What a draft that writes `script` proposes in the first round, in the target's tokens."""
    settings = MockConfig(vocab_size=theirs.size, **config)
    drafter = ReencodeDrafter(Writer(settings, script), Translation(ours, theirs))
    engine = Engine.load(MockBackend(MockConfig(vocab_size=ours.size, seed=1)), draft=drafter, width=width)
    stream = engine.stream(list(prompt), max_tokens=20, seed=1)
    drafts = next(iter(stream)).drafts
    stream.close()
    return drafts


def test_the_text_of_a_draft_is_re_encoded() -> None:
    theirs = Vocabulary([b"a", b"b", b"c"])
    ours = PieceTokenizer([b"a", b"ab", b"b", b"bc", b"c", b"cc"])
    write = partial(first_drafts, Vocabulary.of(ours), theirs)
    # prompt "a" is one token of the draft's, which goes on with b, c, a, b, ...
    script = [0, 1, 2, 0, 1, 2, 2, 0, 0]
    assert write(script, 6) == [3, 1, 5]  # bc ab cc: fewer tokens than it wrote
    assert write(script, 3) == [3, 0]  # bc a, which more text would make ab
    assert write(script, 1) == [2]  # b, not the ab of emitted a and drafted b
    assert write([0, 2, 2, 2, 2, 2], 3) == [5, 4]
    assert write([0] * 9, 5) == [0] * 5
    longer = Vocabulary([b"a", b"abcabc"])
    assert first_drafts(Vocabulary.of(ours), longer, [0, 1, 1, 1, 1], 3) == [1, 4, 1]  # enough after one pass: ab c ab


def test_half_a_character_is_not_offered() -> None:
    theirs = Vocabulary([b"a", b"\xc3", b"\xa9", b"\xa9\xc3"])
    ours = Vocabulary([b"a", "é".encode(), b"\xc3", b"\xa9"])
    assert first_drafts(ours, theirs, [0, 1, 2, 1, 2, 0], 3) == [1]  # é, and half of another
    assert first_drafts(ours, theirs, [0, 1, 3, 2, 1, 2], 2) == [1]  # halves in one token
    assert first_drafts(ours, theirs, [0, 1, 1, 1], 1) == []  # it never becomes a character
    # the emitted text ends in half a character, and the draft writes the other half
    assert first_drafts(ours, theirs, [0, 0, 2, 0, 0, 0], 2, prompt=[0, 2]) == [3, 0]


def test_the_end_of_a_text_is_offered() -> None:
    ours = Vocabulary([b"a", b"b", b""], specials={"<end>": 2}, eos_id=2)
    theirs = Vocabulary([b"", b"a", b"b", b""], specials={"</s>": 0, "<pad>": 3}, eos_id=0)
    assert first_drafts(ours, theirs, [0, 2, 1, 0, 1, 1], 4, eos_ids=(0,)) == [1, 0, 2]  # its EOS is the target's
    assert first_drafts(ours, theirs, [0, 2, 1, 3, 1, 1], 4, eos_ids=(0,)) == [1, 0]
    assert first_drafts(ours, theirs, [0, 2, 1, 0, 1, 1], 2, eos_ids=(0,)) == [1, 0]
    # a special token in the prompt is read as its counterpart
    assert first_drafts(ours, theirs, [0, 0, 0, 1, 2, 1, 1], 2, prompt=[0, 2, 1], eos_ids=(0,)) == [0, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_draft_that_fails_is_told(value: float) -> None:
    translation = translate(OURS, THEIRS)
    writer = Writer(DRAFT, [0] * 50, value)
    engine = Engine.load(MockBackend(TARGET), draft=ReencodeDrafter(writer, translation), width=2)
    with pytest.raises(DraftError, match="not finite"):
        engine.generate([0, 1], max_tokens=4, seed=1)
    assert engine.generate([0, 1], max_tokens=4, seed=1, width=0).token_ids
    assert writer.num_slots == 0


@pytest.mark.parametrize("kind", ["shared", "text"])
def test_a_draft_that_agrees_is_kept(kind: str) -> None:
    """The same model behind another order of tokens: every draft stays, and the caches are not read again."""
    order = [3, 0, 2, 1]

    class Twin(MockBackend):
        def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
            scores = super().score(replace(spans, tokens=np.asarray(order)[spans.tokens]), hidden)
            return Scores(scores.counts, scores.logits[:, order])

        def cached(self, slot: Slot) -> list[int]:
            return [order.index(token) for token in super().cached(slot)]

    pieces = [b"p", b"q", b"r", b"s"]
    translation = translate(pieces, [pieces[token] for token in order])
    drafter = drafter_of(kind, Twin(TARGET), translation)
    engine = Engine.load(MockBackend(TARGET), draft=drafter, width=3)
    result = engine.generate([0, 1, 2], max_tokens=40, temperature=0.0)
    assert result.statistics.acceptance_rate == 1.0
    assert result.statistics.rounds == 10
