"""Tokenizers from model files: GGUF metadata (`tokenizer_from_metadata`) or a folder (`tokenizer_from_folder`).

Ids are those transformers gives for the same vocabulary. What cannot be built exactly is refused with the cure: a
tokenizer.json beside the file, which holds everything. Cutting patterns are in `pre.py`, folders in `folder.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.jsonfile import read_text
from outrider.tokenizer.fields import Fields
from outrider.tokenizer.folder import tokenizer_from_folder
from outrider.tokenizer.library import blaming, tokenizer_from_json
from outrider.tokenizer.pre import PRES, pre_for
from outrider.tokenizer.text import TextTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["tokenizer_from_folder", "tokenizer_from_metadata"]

# Values of tokenizer.ggml.token_type; 6 is a byte.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_PREFIX = "tokenizer.ggml."
_PAIR = 2
MAX_PIECE = 1_000  # letters of a piece that is taken apart; SentencePiece itself makes none of more than a few dozen


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Pieces by id as the file lists them. `ids` leaves out unused ones: they only fill up the embedding."""

    pieces: list[str]
    kinds: dict[int, float]  # of the ids that are not ordinary pieces
    ids: dict[str, int]
    named: dict[str, int]  # bos, eos, unknown, padding: those the file has

    def special(self) -> list[str]:
        marked = [self.pieces[token] for token, kind in self.kinds.items() if kind in (_UNKNOWN, _CONTROL)]
        named = [self.pieces[token] for token in self.named.values() if self.kinds.get(token) != _UNUSED]
        return [piece for piece in dict.fromkeys([*marked, *named]) if piece]

    def user_defined(self) -> list[str]:
        return [
            self.pieces[token] for token, kind in self.kinds.items() if kind == _USER_DEFINED and self.pieces[token]
        ]


def tokenizer_from_metadata(metadata: Mapping[str, Any], path: Path) -> TextTokenizer:
    """The tokenizer a GGUF file describes."""
    fields = Fields(metadata, path)
    model = fields.text(f"{_PREFIX}model")
    if model is None:
        raise fields.error(f"{_PREFIX}model is missing: the file holds no tokenizer; use one that does")
    vocabulary = _read_vocabulary(fields, model)
    tokenizer = _own_json(fields, vocabulary) or _from_pieces(fields, model, vocabulary)
    names = {f"{name}_token": vocabulary.pieces[token] for name, token in vocabulary.named.items()}
    return TextTokenizer(
        tokenizer,
        path=path,
        vocab_size=max(vocabulary.ids.values()) + 1,
        bos_id=vocabulary.named.get("bos"),
        eos_id=vocabulary.named.get("eos"),
        names=names,
        chat_template=fields.text("tokenizer.chat_template"),
    )


def _read_vocabulary(fields: Fields, model: str) -> _Vocabulary:
    pieces = fields.strings(f"{_PREFIX}tokens")
    kinds: dict[int, float] = {}
    if f"{_PREFIX}token_type" in fields:
        types = fields.numbers(f"{_PREFIX}token_type", len(pieces))
        kinds = {token: kind for token, kind in enumerate(types[: len(pieces)]) if kind != _NORMAL}
    ids = _number(fields, pieces, {token for token, kind in kinds.items() if kind == _UNUSED})
    if not ids:
        raise fields.error(f"{_PREFIX}tokens is empty; fetch or convert the file again")
    keys = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    # Converters write any number as the padding of models that have none, and nothing is ever padded here.
    named = {name: fields.token(f"{_PREFIX}{key}", len(pieces), used=name != "pad") for name, key in keys.items()}
    if model == "llama":  # SentencePiece's own places, where the file does not say
        for name, token in (("unk", 0), ("bos", 1), ("eos", 2)):
            if named[name] is None and token < len(pieces):
                named[name] = token
    return _Vocabulary(pieces, kinds, ids, {name: token for name, token in named.items() if token is not None})


def _number(fields: Fields, pieces: list[str], unused: set[int]) -> dict[str, int]:
    """Ids by piece. Two ids for one piece are a fault: the same text would have two spellings."""
    used = [token for token in range(len(pieces)) if token not in unused and pieces[token]]
    ids = {pieces[token]: token for token in used}
    if len(ids) != len(used):
        twin = next(token for token in used if ids[pieces[token]] != token)
        twins = f"tokens {twin} and {ids[pieces[twin]]} are both {pieces[twin]!r:.60}"
        raise fields.error(f"{_PREFIX}tokens: {twins}; the file is damaged, fetch or convert it again")
    return ids


def _own_json(fields: Fields, vocabulary: _Vocabulary) -> Tokenizer | None:
    """A whole tokenizer.json some files carry in their metadata."""
    text = fields.text("tokenizer.huggingface.json")
    return None if text is None else _check_same(fields, vocabulary, tokenizer_from_json(text, fields.path))


def _check_same(fields: Fields, vocabulary: _Vocabulary, tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer.json stands in for the metadata only if it numbers the pieces alike."""
    for piece, token in vocabulary.ids.items():
        if tokenizer.id_to_token(token) != piece:
            other = tokenizer.id_to_token(token)
            raise fields.error(
                f"its tokenizer.json belongs to another model: token {token} is {other!r:.60} there and {piece!r:.60} "
                "in the file; put the model's own tokenizer.json beside it"
            )
    return tokenizer


def _beside(fields: Fields, vocabulary: _Vocabulary, unknown: str) -> Tokenizer:
    """The tokenizer.json in the file's folder, for what the metadata alone cannot tell."""
    beside = fields.path.parent / "tokenizer.json"
    if not beside.is_file():
        raise fields.error(f"{unknown}; put the model's tokenizer.json beside the file ({beside})")
    return _check_same(fields, vocabulary, tokenizer_from_json(read_text(beside), beside))


def _from_pieces(fields: Fields, model: str, vocabulary: _Vocabulary) -> Tokenizer:
    if model == "llama":
        tokenizer, adds_bos = _sentencepiece(fields, vocabulary), True
    elif model == "gpt2":
        name, architecture = fields.text(f"{_PREFIX}pre"), fields.text("general.architecture") or ""
        pre = pre_for(name, architecture)
        if pre is None:
            unknown = f"the pre-tokenizer {name!r:.60} ({_PREFIX}pre) is not known; those known are {', '.join(PRES)}"
            return _beside(fields, vocabulary, unknown)
        tokenizer, adds_bos = _byte_level(fields, vocabulary, pre.whole_words), pre.adds_bos
        tokenizer.pre_tokenizer = pre.pre_tokenizer()
        tokenizer.normalizer = pre.normalizer()
    else:
        return _beside(
            fields, vocabulary, f"tokenizers of the kind {model!r:.60} ({_PREFIX}model) cannot be built from it"
        )
    with blaming(fields.path, f"{_PREFIX}tokens cannot be used; fetch or convert the file again"):
        _add_tokens(tokenizer, vocabulary, strips=model == "llama" and _is_phi3(fields))
        _set_ends(fields, tokenizer, vocabulary, adds_bos)
    return tokenizer


def _byte_level(fields: Fields, vocabulary: _Vocabulary, whole_words: bool) -> Tokenizer:
    from tokenizers import decoders

    tokenizer = _bpe(fields, vocabulary.ids, _given_merges(fields), ignore_merges=whole_words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Fields, vocabulary: _Vocabulary) -> Tokenizer:
    """Spaces are pieces' '▁', with one put before the text; characters without a piece are spelled in bytes."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    given = f"{_PREFIX}merges" in fields
    merges = _given_merges(fields) if given else _implied_merges(fields, vocabulary)
    unknown = vocabulary.pieces[vocabulary.named["unk"]] if "unk" in vocabulary.named else None
    tokenizer = _bpe(fields, vocabulary.ids, merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    prefix = fields.flag(f"{_PREFIX}add_space_prefix") is not False
    if prefix and _is_phi3(fields):  # its own tokenizer puts the space before every stretch between special tokens
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _bpe(fields: Fields, ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    from tokenizers import Tokenizer, models

    with blaming(fields.path, f"{_PREFIX}merges do not fit the tokens; fetch or convert the file again"):
        return Tokenizer(models.BPE(ids, merges, **options))


def _given_merges(fields: Fields) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ")) for merge in fields.strings(f"{_PREFIX}merges")]
    if not set(map(len, merges)) <= {_PAIR}:
        where = next(at for at, merge in enumerate(merges) if len(merge) != _PAIR)
        shown = " ".join(merges[where])
        raise fields.error(
            f"{_PREFIX}merges[{where}] must be two pieces, got {shown!r:.60}; fetch or convert the file again"
        )
    return merges  # type: ignore[return-value]  # every one has two


def _implied_merges(fields: Fields, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece stores no merges: any two pieces that make a third may merge, the best third first.

    Equal scores: the longer left piece first, as transformers orders them.
    """
    scores = fields.numbers(f"{_PREFIX}scores", len(vocabulary.pieces))
    # Control and byte pieces are never made of letters.
    made = (_NORMAL, _USER_DEFINED)
    kinds = vocabulary.kinds
    usable = {piece: scores[token] for piece, token in vocabulary.ids.items() if kinds.get(token, _NORMAL) in made}
    longest = max(map(len, usable), default=0)
    if longest > MAX_PIECE:
        raise fields.error(f"{_PREFIX}tokens has a piece of {longest} characters, at most {MAX_PIECE} are possible")
    found = [
        (score, at, len(piece) - at, piece)
        for piece, score in usable.items()
        for at in range(1, len(piece))
        if piece[:at] in usable and piece[at:] in usable
    ]
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(piece[:at], piece[at:]) for _, at, _, piece in found]


def _is_phi3(fields: Fields) -> bool:
    return fields.text("general.architecture") == "phi3"


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, *, strips: bool) -> None:
    """Tokens that are found in the text before anything is cut. Phi-3's swallow the white space after them."""
    from tokenizers import AddedToken

    plain = {"<unk>", "<s>", "<|endoftext|>"}
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, normalized=False, special=True, rstrip=strips and piece not in plain)
            for piece in vocabulary.special()
        ]
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in vocabulary.user_defined()])


def _set_ends(fields: Fields, tokenizer: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    ends: dict[str, str | None] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        wanted = fields.flag(f"{_PREFIX}add_{name}_token")
        token = vocabulary.named.get(name)
        if wanted and token is None:
            raise fields.error(f"{_PREFIX}add_{name}_token is set, but {_PREFIX}{name}_token_id is missing")
        adds = default if wanted is None else wanted
        piece = vocabulary.pieces[token] if adds and token is not None else None
        if piece is not None and piece not in vocabulary.ids:
            raise fields.error(f"{_PREFIX}{name}_token_id is {token}, which the file marks as unused")
        ends[name] = piece
    _put_around(tokenizer, ends["bos"], ends["eos"])


def _put_around(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put these tokens around every text that is encoded with its special tokens."""
    from tokenizers.processors import TemplateProcessing

    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    known = [(piece, tokenizer.token_to_id(piece)) for piece in dict.fromkeys((bos, eos)) if piece]
    tokenizer.post_processor = TemplateProcessing(single=parts, pair=[*parts, "$B:1"], special_tokens=known)
