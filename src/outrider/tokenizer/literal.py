"""Conversations whose content cannot form control tokens.

A chat template writes control tokens such as <|im_end|> around the messages, and the tokenizer recognises them in the
text that comes of it. The same characters inside a message are text that a client typed, and stay text:

1. In every string of the messages, the first letter of a control token is replaced by a stand-in: a private-use
   character that no message and no token has. So is the letter where a string ends with a part of a control token,
   which the next string could complete.
2. The template runs on these messages. It sees all other text as it is, so its tests, trims and cuts work as before;
   whatever it does with a stand-in, no control token comes of it.
3. Its text is encoded as a whole. The control tokens that are found are the template's own.
4. A stretch between two of them that has stand-ins gets its letters back, and is encoded by a copy of the tokenizer
   that takes control tokens for text. All other stretches keep their ids.

Messages without the text of a control token are encoded as a whole and nothing else is done. Control tokens are those
that the tokenizer calls special; others, such as <think>, are words of the model that people may use. A template that
deletes text inside a message could still join the two halves of a token; those that are known cut at the ends only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from outrider.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Messages = Sequence[Mapping[str, Any]]
Letters = dict[int, str]  # code points and what they become, for str.translate
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class LiteralChat:
    """Encodes conversations with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {token: one for token, one in added.items() if one.special and one.content}
        self._tokenizer = tokenizer
        self._texts = {token: one.content for token, one in special.items()}
        # Some tokens are found in the normalised text: other spellings of them, such as capitals, may be, too
        self._has_spellings = tokenizer.normalizer is not None and any(one.normalized for one in special.values())
        self._beginnings = {text[:size] for text in self._texts.values() for size in range(1, len(text))}
        self._longest = max(map(len, self._texts.values()), default=0)

    def encode(
        self, messages: Messages, text: str, render: Callable[[Messages], str], encode: Callable[[str], Encoding]
    ) -> list[int]:
        """The ids of a conversation that `render` writes as `text`."""
        strings = [string for message in messages for string in _strings(message)]
        if any(map(self._starts, strings)):
            hide, show = self._stand_ins([text, *strings])
            hidden = render([_mapped(message, lambda string: self._hidden(string, hide)) for message in messages])
            return self._joined(hidden, encode(hidden), show)
        encoding = encode(text)
        return self._joined(text, encoding, {}) if self._has_spellings else encoding.ids

    def _starts(self, string: str) -> set[int]:
        """Where a control token begins, or the part of one at the end."""
        starts: set[int] = set()
        for text in self._texts.values():
            at = string.find(text)
            while at >= 0:
                starts.add(at)
                at = string.find(text, at + 1)
        for end in {len(string), len(string.rstrip())}:
            sizes = range(1, min(end + 1, self._longest))
            starts.update(end - size for size in sizes if string[end - size : end] in self._beginnings)
        return starts

    def _hidden(self, string: str, hide: Letters) -> str:
        letters = list(string)
        for start in self._starts(string):
            letters[start] = hide[ord(letters[start])]
        return "".join(letters)

    def _stand_ins(self, texts: Sequence[str]) -> tuple[Letters, Letters]:
        """From first letters of control tokens to their stand-ins, and back."""
        used, firsts = set().union(*texts, *self._texts.values()), sorted({text[0] for text in self._texts.values()})
        free = list(islice(_unused(used), len(firsts)))
        if len(free) < len(firsts):
            raise RequestError(
                f"the messages have {len(used)} different characters and leave no private-use character free; "
                "send fewer of those",
                param="messages",
            )
        pairs = list(zip(firsts, free, strict=True))
        return {ord(first): letter for first, letter in pairs}, {ord(letter): first for first, letter in pairs}

    def _joined(self, text: str, encoding: Encoding, show: Letters) -> list[int]:
        """The ids of `text`, in which stretches of the messages' own that look like control tokens are text."""
        ids, offsets, joined = encoding.ids, encoding.offsets, list[int]()
        index = at = 0  # of what follows the last control token, in ids and in the text
        for place, token in enumerate(ids):
            start, end = offsets[place]
            if token in self._texts and text[start:end].strip() == self._texts[token].strip():
                joined += self._stretch(ids[index:place], text[at:start], show, is_first=index == 0)
                joined.append(token)
                index, at = place + 1, end
        return joined + self._stretch(ids[index:], text[at:], show, is_first=index == 0)

    def _stretch(self, ids: list[int], text: str, show: Letters, *, is_first: bool) -> list[int]:
        typed = text.translate(show)
        if typed == text and self._texts.keys().isdisjoint(ids):
            return ids
        return self._as_text(typed) if is_first else self._after_token(typed)

    @cached_property
    def _literal(self) -> tuple[Tokenizer, str]:
        """A copy that takes control tokens for text, and the text of a token that only the copy has: what follows it is
        read like what follows a control token. Some tokenizers put a space before the first stretch alone."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Library

        copy, mark = Library.from_str(self._tokenizer.to_str()), f"\ue000{secrets.token_hex(16)}"
        copy.encode_special_tokens = True
        copy.add_tokens([AddedToken(mark, normalized=False)])
        return copy, mark

    def _after_token(self, text: str) -> list[int]:
        return self._as_text(self._literal[1] + text)[1:]

    def _as_text(self, text: str) -> list[int]:
        encoding = self._literal[0].encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._texts and text[start:end] == self._texts[token]:  # its merges lead there, too
                ids += self._spelled(token)
            else:
                ids.append(token)
        return ids

    def _spelled(self, token: int) -> list[int]:
        """A control token's text letter by letter."""
        copy, mark = self._literal
        letters = (copy.encode(mark + letter, add_special_tokens=False).ids[1:] for letter in self._texts[token])
        return [one for one in chain.from_iterable(letters) if one != token]


def _unused(used: set[str]) -> Iterator[str]:
    return (letter for letter in map(chr, chain(*_PRIVATE)) if letter not in used)


def _strings(value: Any) -> Iterator[str]:
    """All texts in a message, also those of further fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(inner)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, (list, tuple)) else value
