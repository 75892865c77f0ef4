"""How byte-level BPE vocabularies cut text before merging: the table behind GGUF's `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json, so contractions fold case there where llama.cpp spells out
[sS]. A name that is not here is refused: a guess would give other tokens than the model was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# Letters, first those of a word that begins in capitals and ends in small ones, then those of one all in capitals.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_SYMBOLS}|{_SPACES}"
_GPT4O = (
    rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_SYMBOLS}|{_SPACES}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"


@dataclass(frozen=True, slots=True)
class Pre:
    """One way to cut text. The patterns are applied one after another, each to the pieces the last one left."""

    patterns: tuple[str, ...]
    composes: bool = False  # NFC before anything else
    whole_words: bool = False  # a word that is a piece is taken whole, whatever the merges would make of it
    adds_bos: bool = False  # where the file does not say

    def pre_tokenizer(self) -> PreTokenizer:
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

        splits: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> Normalizer | None:
        from tokenizers.normalizers import NFC

        return NFC() if self.composes else None


GPT2 = Pre((_GPT2,))
QWEN2 = Pre((_QWEN2,), composes=True)
_LLAMA_BPE = Pre((_LLAMA3,), whole_words=True, adds_bos=True)
_DIGITS_APART = Pre((r"\p{N}", _GPT2))

PRES: dict[str, Pre] = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4"), GPT2),
    **dict.fromkeys(("mpt", "olmo"), Pre((_GPT2,), composes=True)),  # both have GPT-NeoX's vocabulary
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Pre((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "megrez"), QWEN2),
    "deepseek-r1-qwen": Pre((_QWEN2,)),
    "qwen35": Pre((_QWEN35,), composes=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _DIGITS_APART),
    "command-r": Pre((r"\p{N}", _GPT2), composes=True),
    "tekken": Pre((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Pre((_GPT4O,))),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": Pre((r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", _DEEPSEEK3)),
    "falcon": Pre((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
}


def pre_for(name: str | None, architecture: str) -> Pre | None:
    """The way the name stands for; None for an unknown one.

    Files from before the key existed, or with "default", say nothing: then the architecture decides, and what is not
    Qwen is cut like GPT-2, which such files were made for.
    """
    if name is None or name == "default":
        return QWEN2 if architecture.startswith("qwen") else GPT2
    return PRES.get(name)
