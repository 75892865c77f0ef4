"""Requests as they arrived somewhere: a trace in a file, or a made-up one that is the same everywhere."""

from __future__ import annotations

import csv
import gzip
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from outrider.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # as the Azure LLM inference traces name them


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came (in seconds, the first at 0), and the tokens of its prompt and of its answer."""

    at: float
    num_prompt: int
    num_answer: int


def read_trace(path: Path, most: int | None = None) -> list[Arrival]:
    """The first `most` requests of a CSV file (.gz as well) with the columns of `COLUMNS`, in order of arrival.

    Time stamps are dates with times, or seconds.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
            if missing := set(COLUMNS) - set(rows.fieldnames or ()):
                raise ConfigError(f"{path} has no column {min(missing)}; it needs {', '.join(COLUMNS)}", param="trace")
            arrivals = list(_arrivals(path, rows, most))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or f"it is not CSV text ({error})"
        raise ConfigError(f"cannot read {path}: {reason}", param="trace") from None
    if not arrivals:
        raise ConfigError(f"{path} holds no requests", param="trace")
    first = min(arrival.at for arrival in arrivals)
    return sorted([replace(arrival, at=arrival.at - first) for arrival in arrivals], key=lambda arrival: arrival.at)


def made_up(count: int, seed: int = 0) -> list[Arrival]:
    """Poisson arrivals, one a second, with log-normal lengths: half of the prompts have over 700 tokens, half of the
    answers over 130, and a tenth over three times that.
    """
    draw = random.Random(seed)
    arrivals, at = [], 0.0
    for _ in range(count):
        num_prompt = min(8000, math.ceil(draw.lognormvariate(math.log(700), 0.9)))
        arrivals.append(Arrival(at, num_prompt, min(1500, math.ceil(draw.lognormvariate(math.log(130), 0.9)))))
        at += draw.expovariate(1.0)
    return arrivals


def shortened(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """All lengths divided by `factor`."""
    return [Arrival(one.at, math.ceil(one.num_prompt / factor), math.ceil(one.num_answer / factor)) for one in arrivals]


def squeezed(arrivals: Sequence[Arrival], seconds: float) -> list[Arrival]:
    """The same pattern of arrivals, the last one at `seconds`."""
    span = max(arrival.at for arrival in arrivals)
    return [replace(arrival, at=arrival.at * seconds / span if span else 0.0) for arrival in arrivals]


def _arrivals(path: Path, rows: csv.DictReader[str], most: int | None) -> Iterator[Arrival]:
    for number, row in enumerate(rows, 2):
        if most is not None and number - 2 >= most:
            return
        time, *lengths = (row[name] or "" for name in COLUMNS)
        try:
            num_prompt, num_answer = map(int, lengths)
            yield Arrival(_seconds(time), num_prompt, num_answer)
        except ValueError:
            num_prompt = num_answer = 0
        if num_prompt < 1 or num_answer < 1:
            raise ConfigError(
                f"{path}, line {number}: a line is a time stamp and two numbers of tokens, at least 1 each",
                param="trace",
            )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds
