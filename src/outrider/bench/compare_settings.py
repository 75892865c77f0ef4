"""What `outrider bench` is asked to compare, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.bench.contest import AUTO
from outrider.bench.peers import check_names
from outrider.checks import check_number, check_whole
from outrider.errors import ConfigError
from outrider.models.names import DEFAULT

Width = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """What to compare. `draft` and `peers` are as people write them; `limit` is how many prompts of a kind are taken.

    With `batch` above 1 so many prompts of a kind run together; where a kind has fewer, they are taken again. Peers
    compute on the CPU, and where there are any our engine does, too.
    """

    model: str = DEFAULT
    draft: str | None = None
    widths: tuple[Width, ...] = (AUTO,)
    trees: tuple[int, ...] = ()
    prompts: Path | None = None
    limit: int | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    threads: int | None = None
    batch: int = 1
    repeats: int = 5
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("batch", 1), ("repeats", 1)):
            check_whole(getattr(self, name), name, least, ConfigError)
        for name in ("limit", "threads"):
            if getattr(self, name) is not None:
                check_whole(getattr(self, name), name, 1, ConfigError)
        check_number(self.temperature, "temperature", 0.0, 1e6, ConfigError)
        if not self.widths and not self.trees:
            raise ConfigError("there is no width to compare; write --width auto", param="width")
        check_names(self.peers)

    def told(self) -> dict[str, Any]:
        """As JSON takes it, with what the numbers mean."""
        return {
            **asdict(self),
            "prompts": None if self.prompts is None else self.prompts.name,
            "time": "from asking to the last token, reading the prompt included",
            "all": "geometric mean of the ratios of the kinds; of speeds, all tokens over all seconds",
            "interval": "90 % bootstrap interval of the median over repeats; their range when there are fewer than 5",
        }


def parse_widths(text: str) -> tuple[Width, ...]:
    """What `--width auto,3` means."""
    return tuple(AUTO if part == AUTO else _number(part, "width", f"{AUTO} or ") for part in _parts(text))


def parse_trees(text: str) -> tuple[int, ...]:
    """What `--tree 8,16` means: numbers of drafted tokens in a tree."""
    return tuple(_number(part, "tree") for part in _parts(text))


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _number(text: str, param: str, other: str = "") -> int:
    if not text.isdecimal() or int(text) < 1:
        cure = "; plain decoding is always measured" if text == "0" else ""
        raise ConfigError(f"{param} takes {other}numbers from 1 with commas, got {text!r}{cure}", param=param)
    return int(text)
