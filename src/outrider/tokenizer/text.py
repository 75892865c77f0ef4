"""A model's tokenizer: text to ids and back, the bytes of single tokens for streaming, and the chat template.

Wraps a `tokenizers.Tokenizer` that `build.py` puts together, and knows nothing of file formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelFileError, RequestError
from outrider.tokenizer.library import blaming
from outrider.tokenizer.literal import LiteralChat

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from outrider.tokenizer.template import ChatTemplate

_TRIAL = "Wörter, 1 日\n"  # letters a small vocabulary need not have
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TextTokenizer:
    """The tokenizer of one model. `names` are the special tokens a chat template may ask for, such as bos_token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        path: Path,
        vocab_size: int,
        bos_id: int | None,
        eos_id: int | None,
        names: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self.path = path
        self.vocab_size = vocab_size  # highest id + 1; a model's logits may have more columns
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, one in added.items() if one.special)
        self._names = dict(names)
        self._tokenizer = tokenizer
        self._spell = _spelling(tokenizer, path)
        self._bytes: dict[int, bytes] = {}
        self._try()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text; `add_special` puts BOS and EOS around it where the model's own tokenizer does.

        Special tokens written in the text become their ids. Text from `chat` already has its BOS.
        """
        return self._encoding(text, add_special).ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]], text: str) -> list[int]:
        """The ids of a conversation that `chat` wrote as `text`. Special tokens in content stay text (`literal.py`)."""
        return self._literal.encode(messages, text, self.chat, lambda written: self._encoding(written, False))

    @cached_property
    def _literal(self) -> LiteralChat:
        return LiteralChat(self._tokenizer)

    def _encoding(self, text: str, add_special: bool) -> Encoding:
        try:
            with blaming(self.path, "its tokenizer cannot encode this text"):
                return self._tokenizer.encode(text, add_special_tokens=add_special)
        except ModelFileError as error:
            if not isinstance(text, str):
                raise RequestError(f"the prompt must be text, got {type(text).__name__}", param="prompt") from error
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                said = "the prompt holds half a surrogate pair; send valid Unicode"
                raise RequestError(said, param="prompt") from error
            raise

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of whole answers, as transformers gives it.

        SentencePiece drops the space a text begins with, and shows a run of bytes that is not UTF-8 as one U+FFFD per
        byte; streamed `token_bytes` keep that space.
        """
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the answer's text: nothing for special tokens and for ids that only pad the logits."""
        data = self._bytes.get(token)
        if data is None:
            piece = None if token in self.special_ids else self.piece(token)
            data = self._bytes[token] = b"" if piece is None else self._spell(piece)
        return data

    def piece(self, token: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that has no piece."""
        return self._tokenizer.id_to_token(token)

    def _try(self) -> None:
        """Use it once: what a damaged file lets it do wrong shows here and not in somebody's request."""
        with blaming(self.path, "its tokenizer does not work; fetch or convert the file again"):
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            for special in (True, False):
                self.decode(self._tokenizer.encode(_TRIAL, add_special_tokens=special).ids, skip_special=special)

    @property
    def has_chat(self) -> bool:
        return self.chat_template is not None

    @cached_property
    def template(self) -> ChatTemplate:
        """The compiled chat template; a ModelFileError if it does not parse."""
        from outrider.tokenizer.template import ChatTemplate

        if self.chat_template is None:
            raise RequestError("this model has no chat template; send a plain prompt instead", param="messages")
        return ChatTemplate(self.chat_template, names=self._names, path=self.path)

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model was trained to read it; encode it with `add_special=False`."""
        return self.template.render(messages, add_generation_prompt=add_generation_prompt)

    def num_different(self, other: TextTokenizer) -> int:
        """Ids that mean another token in the other vocabulary, or none. A draft model must share (almost) all."""
        ours, theirs = (one._tokenizer.get_vocab(with_added_tokens=True) for one in (self, other))
        return sum(theirs.get(piece) != token for piece, token in ours.items())


def _spelling(tokenizer: Tokenizer, path: Path) -> Callable[[str], bytes]:
    """How pieces become bytes, read off the decoder so that streamed and whole text agree."""
    decoder: Any = tokenizer.decoder
    state: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        return lambda piece: _from_alphabet(piece, alphabet)
    spaces = any(step["type"] == "Replace" and step.get("content") == " " for step in steps)
    if spaces or "Metaspace" in kinds:
        return _from_sentencepiece if "ByteFallback" in kinds else _from_metaspace
    shown = ", ".join(sorted(kinds))
    raise ModelFileError(
        f"{path}: its tokenizer joins tokens in a way that is not known here (decoder: {shown}); use a model with "
        "byte-level BPE or SentencePiece"
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letter for every byte: printable ones stand for themselves, the others are moved past 255 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(moved)}


def _from_alphabet(piece: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[letter] for letter in piece])
    except KeyError:  # an added token, written as it is
        return piece.encode()


def _from_sentencepiece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else _from_metaspace(piece)


def _from_metaspace(piece: str) -> bytes:
    return piece.replace("▁", " ").encode()
