"""Structured output: which tokens a JSON schema, a regular expression or a grammar lets follow. llguidance does the
parsing; here its masks meet drafts that may be refused.

The mask is part of the target distribution, so a constrained answer is judged like any other: drafts that it forbids
have probability 0, forced ones are proposed like any other draft and judged as well.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import BackendError, MissingPackageError, RequestError
from outrider.types import Array, Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LONGEST = 200  # letters of the library's words that are passed on
REMEMBERED = 64  # compiled constraints: a service asks for the same few again and again
# One space after separators. Free whitespace would let a small model write blanks for ever and call it JSON.
JSON_STYLE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles constraints for one vocabulary. May be called from any thread."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        encode: Callable[[str], Sequence[int]],
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> None:
        self._token_bytes = token_bytes
        self._encode = encode
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._known: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()

    def matcher(self, constraint: Constraint) -> Matcher:
        """The beginning of an answer; a RequestError when the constraint makes no sense."""
        return Matcher(self.compile(constraint).deep_copy(), self._vocab_size)

    def compile(self, constraint: Constraint) -> LLMatcher:
        """Known from before, or made now; a large one may take a second, and nobody else waits for it."""
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
                return self._compiled[constraint]
            if self._known is None:
                self._known = self._build(_library())
        compiled = self._compile(constraint, self._known)
        with self._lock:
            self._compiled[constraint] = compiled
            if len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, constraint: Constraint, known: LLTokenizer) -> LLMatcher:
        llguidance = _library()
        rules = _rules(llguidance.LLMatcher, constraint)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = llguidance.LLMatcher(known, rules, log_level=0, limits=limits)
        if not matcher.is_error():
            trial = matcher.deep_copy()
            trial.compute_bitmask()  # what is too much for the parser mostly shows here, not in a step of the engine
            if not trial.is_error():
                return matcher
            matcher = trial
        raise _refusal(constraint, matcher.get_error())

    def _build(self, llguidance: Any) -> LLTokenizer:
        """The vocabulary as llguidance wants it. A model without an end gets one that stands for no token."""
        size, eos = self._vocab_size, list(self._eos_ids) or [self._vocab_size]
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(self._token_bytes, self._encode, size, eos))
        built: LLTokenizer = llguidance.LLTokenizer(wrapped, n_vocab=max(size, eos[0] + 1), eos_token=eos)
        return built


class Matcher:
    """What may follow one answer. Masks are remembered until a token is emitted: draft and judge ask for the same."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._size = vocab_size
        self._ahead: list[int] = []  # drafts that the matcher has read beyond the emitted tokens
        self._masks: dict[tuple[int, ...], Array | None] = {}

    @property
    def is_complete(self) -> bool:
        self._go_to(())
        return self._matcher.is_stopped()

    def allowed(self, drafted: Sequence[int]) -> Array | None:
        key = tuple(drafted)
        if key not in self._masks:
            self._masks[key] = self._mask() if self._go_to(drafted) else None
        return self._masks[key]

    def forced(self) -> list[int]:
        self._go_to(())
        return self._matcher.compute_ff_tokens()

    def advance(self, token: int) -> None:
        self._masks.clear()
        self._go_to(())
        if not self._matcher.consume_token(token):
            why = self._matcher.get_error()
            if "satisfy" not in why:  # a limit of the parser was hit
                raise self._exhausted()
            raise BackendError(f"token {token} was emitted against the constraint: {_first_line(why)}")

    def _exhausted(self) -> RequestError:
        """A limit of the parser was hit: the constraint is too large, too deep or too ambiguous."""
        why = _first_line(self._matcher.get_error())
        return RequestError(f"the constraint cannot be followed further ({why}); simplify it", param="constraint")

    def _mask(self) -> Array:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise self._exhausted()
        return np.unpackbits(bits, bitorder="little", count=self._size).view(np.bool_)

    def _go_to(self, drafted: Sequence[int]) -> bool:
        """Read exactly these drafts; False when the constraint forbids one of them."""
        common = 0
        while common < min(len(drafted), len(self._ahead)) and drafted[common] == self._ahead[common]:
            common += 1
        if common < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - common)
            del self._ahead[common:]
        if common == len(drafted):
            return True
        rest = list(drafted[common:])
        taken = 0 if self._matcher.is_stopped() else self._matcher.try_consume_tokens(rest)
        self._ahead += rest[:taken]
        return taken == len(rest)


class _Vocabulary:
    """A tokenizer as llguidance's wrapper reads it."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        encode: Callable[[str], Sequence[int]],
        size: int,
        eos_ids: Sequence[int],
    ) -> None:
        pieces = [token_bytes(token) for token in range(size)]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece] + [
            eos for eos in eos_ids if eos >= size or pieces[eos]
        ]
        self.tokens = [piece or b"<%d>" % token for token, piece in enumerate(pieces)]
        self.tokens += [b"<end>"] * (max(size, eos_ids[0] + 1) - size)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # the wrapper asks whether bytes would do
            raise TypeError("text is encoded, not bytes")
        try:
            return list(self._encode(text))
        except RequestError:  # a small vocabulary without these letters
            return []


def _rules(matcher: Any, constraint: Constraint) -> str:
    rules: str
    if constraint.kind == "regex":
        rules = matcher.grammar_from_regex(constraint.text)
    elif constraint.kind == "grammar":
        rules = matcher.grammar_from_lark(constraint.text)
    else:
        text = '{"type": "object"}' if constraint.kind == "json" else constraint.text
        try:
            json.loads(text)
            rules = matcher.grammar_from_json_schema(text, defaults=JSON_STYLE)
        except (ValueError, RecursionError) as error:
            raise _refusal(constraint, str(error)) from None
    return rules


def _refusal(constraint: Constraint, why: str) -> RequestError:
    name = {"json_schema": "JSON schema", "regex": "regular expression"}.get(constraint.kind, constraint.kind)
    return RequestError(f"this {name} cannot be used: {_first_line(why)}; correct it", param="constraint")


def _first_line(why: str) -> str:
    """llguidance shows the place in lines that follow."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    said = ([line for line in lines if line.startswith("error: ")] or lines or ["it is empty"])[0]
    if said.startswith("NoExtension"):
        return "no text satisfies it"
    said = said.removeprefix("error: ").removeprefix("Parser Error: ").rstrip(":;.")
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}..."


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingPackageError(
            "constraints need llguidance; install it with pip install 'outrider[grammar]'", param="constraint"
        ) from None
    return llguidance
