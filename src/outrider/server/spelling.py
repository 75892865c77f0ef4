"""Tokens as text, for logprobs, echoes and traces."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from outrider.errors import RequestError, TokenRangeError
from outrider.tokenizer.base import Tokenizer


class Spelling:
    """How single tokens are written. Without a tokenizer they go by their ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def data(self, token: int) -> bytes:
        """What the token adds to a text: nothing, for special tokens."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def name(self, token: int) -> str:
        """The token's text; special tokens go by their names, parts of characters by their bytes."""
        data = self.data(token)
        if not data:
            piece = getattr(self._tokenizer, "piece", None)
            return (piece(token) if piece is not None else None) or f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def text(self, tokens: Sequence[int], vocab_size: int, param: str) -> str:
        """The text of tokens that a caller sent as `param`."""
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer, so its ids have no text", param=param)
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise TokenRangeError(
                    f"there is no token {token}; this vocabulary runs from 0 to {vocab_size - 1}", param=param
                )
        return b"".join(map(self.data, tokens)).decode(errors="replace")

    def length(self, tokens: Sequence[int]) -> int:
        """Characters of the tokens' text."""
        return len(b"".join(map(self.data, tokens)).decode(errors="replace"))


class Offsets:
    """Where tokens begin in a text that grows, half characters included."""

    def __init__(self, spelling: Spelling, start: int = 0) -> None:
        self._spelling = spelling
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._at = start

    def of(self, tokens: Iterable[int]) -> list[int]:
        """The places of the next tokens."""
        places = []
        for token in tokens:
            places.append(max(self._at, 0))
            self._at += len(self._decode(self._spelling.data(token)))
        return places
