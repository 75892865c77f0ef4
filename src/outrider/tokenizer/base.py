"""Tokens to text, as they are emitted: the tokenizer contract, and the stream that never shows half a character
nor part of a stop string. Both see emitted tokens only, so neither ever has to go back.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from outrider.errors import RequestError


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer that also knows how its model reads conversations."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str: ...


@runtime_checkable
class LiteralTokenizer(Protocol):
    """A chat tokenizer that knows what a client typed from what its template wrote."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]], text: str) -> list[int]:
        """The ids of a conversation that `chat` wrote as `text`. Content of messages forms no control tokens."""


class PieceTokenizer:
    """A tokenizer over a fixed list of byte strings; encodes by the longest piece that fits. For mocks and toys."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        if len(set(pieces)) != len(pieces) or b"" in pieces:
            raise ValueError("pieces must be distinct and not empty")
        self.pieces = list(pieces)
        self._ids = {piece: token for token, piece in enumerate(pieces)}
        self._longest = max(map(len, pieces))

    def encode(self, text: str) -> list[int]:
        data, tokens, at = text.encode(), [], 0
        while at < len(data):
            for size in range(self._longest, 0, -1):
                token = self._ids.get(data[at : at + size])
                if token is not None:
                    break
            else:
                rest = data[at : at + 8].decode(errors="replace")
                some = ", ".join(repr(piece.decode(errors="replace")) for piece in self.pieces[-3:])
                raise RequestError(
                    f"this small vocabulary has no piece for {rest!r}; write the prompt with pieces such as {some}",
                    param="prompt",
                )
            tokens.append(token)
            at += len(self.pieces[token])
        return tokens

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


class TextStream:
    """The text of one answer. `push` returns what may be shown now; a match of a stop string ends the text before it.

    text pushed   [ shown ............ | held ]    held: may still become a stop string
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._stop = tuple(stop)
        self._held = ""
        self._shown: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that may be shown now; without `may_stop` no stop string is looked for in it."""
        return self._release(self._decode(self._token_bytes(token)), may_stop)

    def finish(self) -> str:
        """What was held back becomes text: no stop string came of it. Half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        rest = self._held + self._decode(b"", True)
        self._held = ""
        if rest:
            self._shown.append(rest)
        return rest

    def _release(self, new: str, may_stop: bool) -> str:
        if self._stop and may_stop:
            new = self._held + new
            starts = [at for at in (new.find(stop) for stop in self._stop) if at >= 0]
            if starts:
                self.stopped, self._held = True, ""
                new = new[: min(starts)]
            else:
                keep = max(_overlap(new, stop) for stop in self._stop)
                cut = len(new) - keep
                new, self._held = new[:cut], new[cut:]
        if new:
            self._shown.append(new)
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
