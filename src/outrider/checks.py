"""Checks of plain values, shared by requests and configs. Each names the field, what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real

from outrider.errors import OutriderError

Refusal = type[OutriderError]


def check_whole(value: object, name: str, least: int, refusal: Refusal, hint: str = "") -> None:
    """A whole number of at least `least`. numpy's integers count, booleans do not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refusal(f"{name} must be a whole number{hint}, got {value!r}", param=name)
    if int(value) < least:
        raise refusal(f"{name} must be at least {least}{hint}, got {value}", param=name)


def check_number(value: object, name: str, low: float, high: float, refusal: Refusal, above: bool = False) -> None:
    """A finite number in [low, high], or (low, high] when `above`; an infinite `high` is no limit."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise refusal(f"{name} must be a number, got {value!r}", param=name)
    number = float(value)
    if not low <= number <= high or (above and number == low) or math.isinf(number):
        bounds = f"{'above' if above else 'at least'} {low:g}"
        bounds += " and finite" if math.isinf(high) else f" and at most {high:g}"
        raise refusal(f"{name} must be {bounds}, got {value}", param=name)


def check_collection(value: object, name: str, of: str, refusal: Refusal) -> None:
    """Something that can be looked through twice: a list, a tuple, a set, ..., but no string and no generator."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        raise refusal(f"{name} takes a list of {of}, got {value!r}", param=name)
