"""Requests in flight as plain data, and back: what a snapshot holds.

A request goes on where it was because its tokens, its seed and its rule say everything about what follows. The target's
cache is there to save reading again; text, penalties and draft caches are made anew from the tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from outrider.backends.base import Backend, State
from outrider.engine.intake import Intake, fresh_seed
from outrider.engine.statefile import read_state, write_state
from outrider.errors import RequestError, SnapshotError
from outrider.metrics import Outcome, Statistics
from outrider.sampling.noise import seed_words
from outrider.types import Job, Request, TokenLogprob

log = logging.getLogger("outrider")

_KEPT = "request_id num_prompt seed rule limit drafters width max_width tree".split()  # noqa: SIM905
_TIMES = "arrival started first_token deadline".split()  # noqa: SIM905 - kept as distances from now


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A file of requests. `model` says what they were running on, `notes` are the caller's own."""

    path: Path
    model: dict[str, Any]
    requests: list[dict[str, Any]]
    notes: dict[str, Any]

    @classmethod
    def take(cls, path: str | PathLike[str], target: Backend, jobs: Sequence[Job], now: float) -> Snapshot:
        """Of jobs as they are between two steps; nothing is written yet."""
        return cls(Path(path), _model(target), [_of_job(job, target, now) for job in jobs], {})

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Snapshot:
        content = read_state(Path(path))
        return cls(Path(path), content["model"], content["requests"], content["notes"])

    def write(self, notes: Mapping[str, Any] | None = None) -> None:
        write_state(
            self.path, {"model": self.model, "requests": self.requests, "notes": {**self.notes, **(notes or {})}}
        )

    def jobs(self, target: Backend, intake: Intake, methods: Sequence[str], now: float) -> list[Job]:
        """The requests on this engine; a SnapshotError when they were saved with another model or do not fit."""
        self._check_model(target)
        keeps_state = self.model["layout"] == _layout(target)  # else the tokens are read again
        jobs = []
        for data in self.requests:
            name = data["request_id"]
            try:
                job = _job(data, intake, methods, target.info.context, now)
            except RequestError as error:
                raise SnapshotError(f"{self.path}: {name} does not fit this engine: {error.message}") from error
            except (KeyError, TypeError) as error:
                raise SnapshotError(
                    f"{self.path}: {name} has settings this outrider does not know ({error}); resume it with the "
                    "outrider that saved it"
                ) from error
            job.saved = data["state"] if keeps_state else None
            jobs.append(job)
        return jobs

    def _check_model(self, target: Backend) -> None:
        own, saved = _model(target), self.model
        if saved["fingerprint"] == own["fingerprint"] and (own["fingerprint"] or saved == own):
            return
        cure = "load the model it was saved with"
        if any(saved[part] != own[part] for part in ("shape", "layout")):
            raise SnapshotError(
                f"{self.path} was saved with another architecture: {_described(saved)}; this engine runs "
                f"{_described(own)}; {cure}"
            )
        raise SnapshotError(
            f"{self.path} was saved with another model: {saved['name']}, whose weights are not those of the "
            f"{own['name']} loaded here; {cure}"
        )


def _model(target: Backend) -> dict[str, Any]:
    """What must be the same for a request to go on as if nothing had happened. The context may differ."""
    info = target.info
    shape = {name: getattr(info, name) for name in ("vocab_size", "num_columns", "num_layers", "num_hidden")}
    return {"name": info.name, "shape": shape, "layout": _layout(target), "fingerprint": target.identity()}


def _layout(target: Backend) -> str:
    """Whose states can be loaded."""
    return type(target).__name__


def _described(model: Mapping[str, Any]) -> str:
    shape = model["shape"]
    layers = f"{shape['num_layers']} layers, " if shape["num_layers"] else ""
    return f"{model['name']} ({model['layout']}, {layers}{shape['vocab_size']} tokens)"


def _of_job(job: Job, target: Backend, now: float) -> dict[str, Any]:
    if job.params.processors:
        raise SnapshotError(
            f"{job.request_id} has processors, which are code and cannot be saved; leave it out with request_ids",
            param="processors",
        )
    state: State | None = job.saved if job.slot is None else target.save(job.slot)
    request = _plain(replace(job.request, on_token=None))
    request.pop("on_token")
    if not isinstance(job.request.prompt, str):
        request.pop("prompt")  # it is the beginning of the tokens
    statistics = _plain(job.statistics)
    statistics.pop("costs")  # the engine's
    return {
        **{name: getattr(job, name) for name in _KEPT},
        "request": request,
        "tokens": np.asarray(job.tokens, dtype=np.int64),
        "stop_ids": sorted(job.stop_ids),
        "times": {name: None if (at := getattr(job, name)) is None else at - now for name in _TIMES},
        "statistics": statistics,
        "state": state,
        "logprobs": None if job.logprobs is None else list(job.logprobs),
        "prompt_logprobs": None if job.prompt_logprobs is None else list(job.prompt_logprobs),
    }


def _job(data: Mapping[str, Any], intake: Intake, methods: Sequence[str], context: int, now: float) -> Job:
    """The job that goes on with `data`, checked like a new one."""
    if data["limit"] > context:
        raise RequestError(
            f"it may grow to {data['limit']} tokens and the context holds {context}; load the model with "
            f"context={data['limit']}"
        )
    tokens: list[int] = data["tokens"].tolist()
    prompt = tokens[: data["num_prompt"]]
    request: Request = _revived(Request, {"prompt": prompt, **data["request"]})
    # How to speculate is what it was, which this engine might not offer to a new request.
    job = intake.job(replace(request, prompt=prompt, method=None, width=None, max_width=None), data["request_id"], now)
    engines_own = job.drafters
    for name in _KEPT:
        setattr(job, name, data[name])
    for name, distance in data["times"].items():
        setattr(job, name, None if distance is None else now + distance)
    job.request, job.stop_ids = request, frozenset(data["stop_ids"])
    if job.rule == "rejection" and job.params.seed is None:
        # The original may have gone on with the old noise, and lookups may have stored what it said: drafts made from
        # that noise must not be judged by it. A fresh key continues the committed tokens with the target's own law.
        job.seed = fresh_seed()
    job.words = seed_words(job.seed, request.choice)
    known = {field.name for field in fields(Statistics)}  # other versions count other things
    counts = {name: count for name, count in data["statistics"].items() if name in known}
    job.statistics = _revived(Statistics, counts)
    if job.logprobs is not None:
        job.logprobs = [TokenLogprob(*entry) for entry in data["logprobs"]]
    if job.prompt_logprobs is not None:
        told = data["prompt_logprobs"]
        job.prompt_logprobs = [None if entry is None else TokenLogprob(*entry) for entry in told]
    job.drafters = _drafters(job, methods, engines_own)
    _emit_again(job, tokens)
    return job


def _drafters(job: Job, methods: Sequence[str], engines_own: tuple[str, ...]) -> tuple[str, ...]:
    """Those that drafted before, as far as they are here; a request that asked for none of them takes the engine's."""
    for name in job.drafters:
        if name not in methods:
            reason = f"the {name} draft was not loaded on resume"
            job.statistics.add_fallback(reason)
            log.warning("%s: %s", job.request_id, reason)
    kept = tuple(name for name in job.drafters if name in methods)
    return kept if kept or not job.drafters or job.request.method is not None else engines_own


def _emit_again(job: Job, tokens: Sequence[int]) -> None:
    """Text, counts and grammar as they were after these tokens."""
    for token in tokens[job.num_prompt :]:
        job.tokens.append(token)
        if job.counts is not None:
            job.counts[token] = job.counts.get(token, 0) + 1
        if job.text is not None:
            job.text.push(token, may_stop=len(job.tokens) >= job.min_length)
        if job.grammar is not None:
            job.grammar.advance(token)


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, all the way down."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def _revived(kind: Any, value: Any) -> Any:
    """The other way: `kind` is the type the value is declared with."""
    if isinstance(kind, UnionType):  # X | None
        kind = next((part for part in get_args(kind) if is_dataclass(part)), None) if isinstance(value, dict) else None
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: _revived(hints.get(name), entry) for name, entry in value.items()})
    if get_origin(kind) is dict:
        keys, entries = get_args(kind)
        return {_revived(keys, key): _revived(entries, entry) for key, entry in value.items()}
    if get_origin(kind) is list:
        return [_revived(get_args(kind)[0], entry) for entry in value]
    return kind(*value) if kind is Outcome else value
