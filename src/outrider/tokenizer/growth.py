"""How large a value an operation of a chat template would make, asked before it is made: an upper bound, cheaply."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

MAX_CHARACTERS = 10_000_000  # of a text, or entries of a list: more than any context holds
MAX_BITS = 4096  # of a whole number

_NUMBERS = re.compile(r"\d+")


def check(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise jinja2.TemplateRuntimeError(f"it makes a text or list of more than {MAX_CHARACTERS}")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """`left operator right` stays in bounds."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}.get(operator, 0)
        if bits > MAX_BITS:
            raise jinja2.TemplateRuntimeError(f"it makes a number of more than {MAX_BITS} bits")
    elif operator == "+":
        check(_length(left) + _length(right))
    elif operator == "*":
        check(max(_length(left) * _whole(right), _length(right) * _whole(left)))
    elif operator == "%" and isinstance(left, str):
        check(_formatted(left, right if isinstance(right, tuple) else (right,)))


def check_call(name: str, text: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """The method or filter `name` of a text stays in bounds."""
    measure = _SIZES.get(name)
    if measure is not None:
        check(measure(text, [*arguments, *named.values()]))


def _padded(text: Any, arguments: Sequence[Any]) -> int:
    return max(map(_whole, arguments), default=0)


def _replaced(text: Any, arguments: Sequence[Any]) -> int:
    if len(arguments) < 2 or not all(isinstance(one, str) for one in (text, *arguments[:2])):
        return 0
    old, new = arguments[:2]
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _indented(text: Any, arguments: Sequence[Any]) -> int:
    widest = max((max(_whole(one), _length(one)) for one in arguments), default=0)
    return _length(text) + (str(text).count("\n") + 1) * widest


def _spread(text: Any, arguments: Sequence[Any]) -> int:
    return _length(text) + str(text).count("\t") * _padded(text, arguments)


def _filled(text: Any, arguments: Sequence[Any]) -> int:
    return _formatted(str(text), arguments)


def _formatted(text: str, values: Sequence[Any]) -> int:
    """%-formatting and str.format: every mark may write the longest value, padded to the largest number around."""
    nested = [one for value in values for one in (value.values() if isinstance(value, Mapping) else [value])]
    numbers = [int(number[:9]) for number in _NUMBERS.findall(text)]
    widest = max([0, *numbers, *map(_length, nested)])
    if "*" in text or re.search(r":[^}]*\{", text):  # widths are among the values
        widest = max([widest, *map(_whole, nested)])
    return len(text) + (text.count("%") + text.count("{")) * widest


_SIZES: Mapping[str, Callable[[Any, Sequence[Any]], int]] = {
    **dict.fromkeys(("ljust", "rjust", "center", "zfill", "batch", "tojson"), _padded),
    **dict.fromkeys(("format", "format_map"), _filled),
    "replace": _replaced,
    "indent": _indented,
    "expandtabs": _spread,
}


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
