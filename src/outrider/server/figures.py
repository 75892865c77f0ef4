"""What a call used, with the figures of speculation. Of several answers: their sums, and the speed-up of the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from outrider.server.translate import Asked
from outrider.types import Result

T = TypeVar("T")
COUNTS = ("rounds", "drafted", "accepted", "rejected", "bonus")
ATTEMPTS = 5  # at reading figures while the engine writes them


def usage(asked: Asked, results: Sequence[Result]) -> dict[str, Any]:
    """As OpenAI has it, and `speculation` beside it."""
    prompt = sum(len(question.tokens) for question in asked.questions)
    completion = 0 if asked.is_silent else sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "speculation": steady(lambda: _speculation(asked.method, results)) if results else None,
    }


def _speculation(method: str, results: Sequence[Result]) -> dict[str, Any]:
    told = [result.statistics for result in results]
    counts = {name: sum(getattr(one, name) for one in told) for name in COUNTS}
    tokens, fallbacks = sum(one.tokens for one in told), Counter[str]()
    for one in told:
        fallbacks.update(one.fallbacks)
    return {
        "method": method,
        **counts,
        "acceptance_rate": counts["accepted"] / counts["drafted"] if counts["drafted"] else 0.0,
        "tokens_per_round": tokens / counts["rounds"] if counts["rounds"] else 0.0,
        "measured_speedup": told[0].measured_speedup,
        "estimated_speedup": told[0].estimated_speedup,
        "fallbacks": dict(fallbacks),
        "advice": told[0].advice,
        "seed": results[0].seed,
        "accept": results[0].rule,
    }


def steady(read: Callable[[], T]) -> T:
    """What `read` returns. The engine's thread may add a key to what is read meanwhile; then it is read again."""
    for _ in range(ATTEMPTS - 1):
        try:
            return read()
        except RuntimeError:
            continue
    return read()
