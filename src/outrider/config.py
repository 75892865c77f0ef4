"""One frozen, self-validating config per part. A part receives its own, never a root config."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from outrider.checks import check_number, check_whole
from outrider.errors import ConfigError

USUAL_WIDTH = 16  # the most tokens drafted for a request, unless somebody says otherwise
NUM_BYTES = 256
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_TYPES = ("auto", "f32", "f16", "q8")
BACKENDS = ("auto", "native", "torch", "hf", "mock")


def require_int(value: object, name: str, least: int) -> None:
    check_whole(value, name, least, ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who shares a pass, and how large it may be.

    A step feeds at most `step_tokens` tokens: one for each of up to `max_batch` running requests, up to `prefill_chunk`
    of prompts, and drafts in what is left (None: enough for all). `policy` is a name of `sched.policies` or a `Policy`.
    `preempt` says what becomes of a request that has to give its pages up: its tokens are read again later
    ("recompute"), or its pages wait in host memory ("swap"), up to `swap_tokens` of them. None is no limit:
    `max_queue` requests that wait, `max_in_flight` tokens that the running ones may come to, `max_length` of one.
    Waiting requests begin when `together` of them can: where nobody waits for the first token, fewer passes read
    prompts then, which are slower than those that do not.
    """

    max_batch: int = 64
    prefill_chunk: int = 512
    step_tokens: int | None = None
    policy: Any = "fcfs"
    preempt: Literal["recompute", "swap"] = "recompute"
    swap_tokens: int = 65_536
    max_queue: int | None = None
    max_in_flight: int | None = None
    max_length: int | None = None
    together: int = 1

    def __post_init__(self) -> None:
        require_int(self.max_batch, "max_batch", 1)
        require_int(self.together, "together", 1)
        require_int(self.prefill_chunk, "prefill_chunk", 1)
        require_int(self.swap_tokens, "swap_tokens", 0)
        for name, least in (("max_queue", 0), ("max_in_flight", 2), ("max_length", 2)):
            if getattr(self, name) is not None:
                require_int(getattr(self, name), name, least)
        if self.step_tokens is not None:
            require_int(self.step_tokens, "step_tokens", 1)
            if self.step_tokens <= self.max_batch:
                raise ConfigError(
                    f"step_tokens must be more than max_batch ({self.max_batch}), or prompts would never be read; got "
                    f"{self.step_tokens}",
                    param="step_tokens",
                )
        if self.preempt not in ("recompute", "swap"):
            raise ConfigError(f"preempt is recompute or swap, got {self.preempt!r}", param="preempt")

    @property
    def budget(self) -> int:
        """Tokens of a step."""
        return self.step_tokens or max(2048, self.prefill_chunk + (1 + USUAL_WIDTH) * self.max_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """What a request gets that does not ask for itself: `width` 0 is plain decoding, None lets the engine choose, up to
    `max_width`; `tree` says whether drafts may branch, None lets the engine choose.
    """

    width: int | None = None
    max_width: int = USUAL_WIDTH
    tree: bool | None = None

    def __post_init__(self) -> None:
        if self.width is not None:
            require_int(self.width, "width", 0)
        require_int(self.max_width, "max_width", 0)
        if self.tree is not None and not isinstance(self.tree, bool):
            raise ConfigError(f"tree is True, False or None, got {self.tree!r}", param="tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """How a model named by its source is loaded.

    `backend` "auto" runs GGUF files on a CPU with our own kernels ("native"), everything else with torch. `context`
    caps the tokens of one sequence, `cache_tokens` those of all sequences together, `cache_bytes` the memory of their
    keys and values (neither: four contexts, as far as memory goes). `strict` makes a row's bits independent of what
    else is in its pass; natively they always are. `dtype` is what torch keeps weights, keys and values in: bfloat16 on
    a GPU and float32 on a CPU if it is left out. `kv_type` is how the native backend stores keys and values: f16 if it
    is left out, q8 takes half of that. `draft_device` is where draft models run, if not beside the target;
    one that runs ahead gets a second GPU where there is one.
    """

    backend: str = "auto"
    device: str = "auto"
    draft_device: str | None = None
    threads: int | None = None
    context: int | None = None
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    page_size: int = 16
    strict: bool = False
    dtype: str = "auto"
    kv_type: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}", param="dtype")
        if self.kv_type not in KV_TYPES:
            raise ConfigError(f"kv_type must be one of {', '.join(KV_TYPES)}, got {self.kv_type!r}", param="kv_type")
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}", param="backend")
        for name, device in (("device", self.device), ("draft_device", self.draft_device or "auto")):
            if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
                raise ConfigError(f"{name} must be auto, cpu, cuda or cuda:N, got {device!r}", param=name)
        for name, least in (("threads", 1), ("context", 2), ("cache_tokens", 2), ("cache_bytes", 1)):
            if getattr(self, name) is not None:
                require_int(getattr(self, name), name, least)
        if self.cache_tokens is not None and self.cache_bytes is not None:
            raise ConfigError("cache_tokens and cache_bytes both size the cache; give one of them", param="cache_bytes")
        require_int(self.page_size, "page_size", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Which n-grams are looked up: the longest first."""

    min_n: int = 1
    max_n: int = 3

    def __post_init__(self) -> None:
        require_int(self.min_n, "ngram.min_n", 1)
        require_int(self.max_n, "ngram.max_n", 1)
        if self.max_n < self.min_n:
            raise ConfigError(
                f"ngram.max_n must be at least ngram.min_n ({self.min_n}), got {self.max_n}", param="ngram.max_n"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig:
    """The mock model: a random but fixed distribution for every context.

    `drift` mixes another random table into the logits, so a mock with the target's `seed` and some drift is a
    draft that agrees often but not always. `order` limits the dependence to the last tokens (None: all of them).
    `padding` adds logit columns that stand for no token, as real models have. `max_rewind=0` cannot go back.
    With `text` the tokens are all bytes, an end (256) and words, so that any text can be a prompt; it speaks in words.
    """

    vocab_size: int = 32
    padding: int = 0
    context: int = 4096
    seed: int = 0
    sharpness: float = 1.5
    drift: float = 0.0
    order: int | None = None
    num_contexts: int = 4099
    eos_ids: tuple[int, ...] = ()
    max_rewind: int | None = None
    max_slots: int | None = None
    seconds_per_pass: float = 0.0
    seconds_per_token: float = 0.0
    text: bool = False

    def __post_init__(self) -> None:
        require_int(self.vocab_size, "mock.vocab_size", 1)
        if self.text and self.vocab_size <= NUM_BYTES + 1:
            raise ConfigError(
                f"mock.text needs more than {NUM_BYTES + 1} tokens, got {self.vocab_size}", param="mock.vocab_size"
            )
        require_int(self.padding, "mock.padding", 0)
        require_int(self.context, "mock.context", 2)
        require_int(self.num_contexts, "mock.num_contexts", 1)
        for name in ("order", "max_rewind", "max_slots"):
            if getattr(self, name) is not None:
                require_int(getattr(self, name), f"mock.{name}", 0)
        for name in ("seconds_per_pass", "seconds_per_token"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"mock.{name} must not be negative, got {getattr(self, name)}", param=f"mock.{name}")
        for eos in self.eos_ids:
            if not 0 <= eos < self.vocab_size:
                raise ConfigError(
                    f"mock.eos_ids: {eos} is not a token; ids run from 0 to {self.vocab_size - 1}",
                    param="mock.eos_ids",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """Suffix matching: what counts as a match, how far a proposal goes, and how much past text is kept.

    A match has `min_match` to `max_match` tokens; its latest `occurrences` are counted. A proposal is at most `factor`
    times as long as the match, and goes on while the probabilities along its path multiply to `min_probability`; one
    is count / (all + `smoothing` / matched tokens). `max_tokens` of past and running text are kept, of one tenant
    `tenant_tokens` (None: as many), the latest.
    """

    min_match: int = 2
    max_match: int = 16
    occurrences: int = 6
    factor: float = 2.0
    min_probability: float = 0.1
    smoothing: float = 1.0
    max_tokens: int = 1_000_000
    tenant_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("min_match", 1), ("max_match", 1), ("occurrences", 1), ("max_tokens", 64)):
            require_int(getattr(self, name), f"suffix.{name}", least)
        if self.tenant_tokens is not None:
            require_int(self.tenant_tokens, "suffix.tenant_tokens", 64)
        check_number(self.max_match, "suffix.max_match", 1, 64, ConfigError)
        check_number(self.max_tokens, "suffix.max_tokens", 64, 1e9, ConfigError)  # places are numbers of 32 bits
        if self.max_match < self.min_match:
            message = f"suffix.max_match must be at least suffix.min_match ({self.min_match}), got {self.max_match}"
            raise ConfigError(message, param="suffix.max_match")
        check_number(self.factor, "suffix.factor", 0.0, 1e6, ConfigError, above=True)
        check_number(self.min_probability, "suffix.min_probability", 0.0, 1.0, ConfigError)
        check_number(self.smoothing, "suffix.smoothing", 0.0, 1e6, ConfigError)
