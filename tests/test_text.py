"""Text of emitted tokens: never half a character, never part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import RequestError
from outrider.tokenizer.base import PieceTokenizer, TextStream

BYTES = PieceTokenizer([bytes([value]) for value in range(256)])


def push_all(text: str, sizes: list[int], stop: list[str]) -> tuple[list[str], TextStream, int]:
    """Feed the text in pieces of the given sizes; returns what was shown, and how many pieces it took."""
    data, pieces, at = text.encode(), [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    pieces.append(data[at:])
    pieces = [piece for piece in pieces if piece]

    class Direct:
        def encode(self, text: str) -> list[int]:
            raise AssertionError

        def token_bytes(self, token: int) -> bytes:
            return pieces[token]

    stream = TextStream(Direct(), stop)
    shown = []
    for token in range(len(pieces)):
        shown.append(stream.push(token))
        if stream.stopped:
            return shown, stream, token + 1
    shown.append(stream.finish())
    return shown, stream, len(pieces)


@given(text=st.text(), sizes=st.lists(st.integers(1, 5), max_size=30))
def test_any_cut_of_the_bytes_gives_the_text_back(text: str, sizes: list[int]) -> None:
    shown, stream, _ = push_all(text, sizes, [])
    assert "".join(shown) == stream.text == text
    assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text


@given(
    text=st.text(alphabet="abé", max_size=20),
    sizes=st.lists(st.integers(1, 3), max_size=20),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_cuts_at_its_first_character(text: str, sizes: list[int], stops: list[str]) -> None:
    """The answer ends with the first piece that completes a stop string, and shows nothing of it."""
    shown, stream, used = push_all(text, sizes, stops)
    if not any(stop in text for stop in stops):
        assert not stream.stopped and stream.text == text
        return
    assert stream.stopped and "".join(shown) == stream.text
    assert not any(stop in stream.text for stop in stops)
    cuts, at = [], 0
    for size in [*sizes, len(text.encode())]:
        at = min(at + size, len(text.encode()))
        if not cuts or cuts[-1] < at:
            cuts.append(at)
    seen = text.encode()[: cuts[used - 1]].decode(errors="ignore")
    assert stream.text == seen[: min(seen.index(stop) for stop in stops if stop in seen)]
    if used > 1:
        before = text.encode()[: cuts[used - 2]].decode(errors="ignore")
        assert not any(stop in before for stop in stops)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(BYTES, ["<end>"])
    assert [stream.push(token) for token in b"a<en"] == ["a", "", "", ""]
    assert stream.push(ord("x")) == "<enx"
    assert [stream.push(token) for token in b"<e"] == ["", ""]
    assert stream.finish() == "<e" and stream.text == "a<enx<e"


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    stream = TextStream(BYTES)
    assert stream.push(0xC3) == "" and stream.finish() == "\ufffd"


def test_pieces_encode_by_the_longest_match() -> None:
    tokenizer = PieceTokenizer([b"a", b"ab", b"b", b"\xc3", b"\xa9"])
    assert tokenizer.encode("aabé") == [0, 1, 3, 4]
    with pytest.raises(RequestError, match="no piece for 'zz'"):
        tokenizer.encode("azz")
