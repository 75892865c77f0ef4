"""Training an EAGLE-3 head: the target answers prompts, and the head learns to guess what it says, some tokens ahead.

All that a run depends on is in its settings, its texts and its last checkpoint: one that was broken off goes on as if
nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from outrider.backends.base import HeadHost
from outrider.backends.heads import output_of
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.head_spec import EagleSpec
from outrider.train.batches import plan
from outrider.train.distance import at_once, missed_by, pull_of
from outrider.train.features import Batch, Features
from outrider.train.headfile import begin_with, check_start, head_spec, write_head
from outrider.train.net import EagleNet, Past
from outrider.train.optimizer import Optimizer
from outrider.train.settings import TrainSettings
from outrider.train.texts import Texts

CHECKPOINT = "checkpoint.pt"
FLOOR = 0.02  # of the highest rate: the last updates learn so fast
REPORTED = 20  # updates that a report is about
HELD_BATCHES = 16  # of texts that were held out, at a checkpoint


class Report(NamedTuple):
    """After some updates: the loss, and how often all guesses up to each step were what the target says; `held` is the
    same of texts that are not trained on, at checkpoints."""

    update: int
    loss: float
    kept: list[float]
    seconds_left: float
    held: list[float] | None = None


class Rows(NamedTuple):
    """Where the target said something: entry `entries - s` guesses in step s what `places` would say next. Both count
    through all texts of a batch; `reach` is in how many steps there is such an entry."""

    entries: Tensor
    places: Tensor
    reach: list[int]  # rows that take part in each step: those which do come first


class EagleTrainer:
    """One run, in `folder`."""

    def __init__(self, engine: Engine, texts: Texts, settings: TrainSettings, folder: Path) -> None:
        target: Any = engine.loop.target
        self.settings, self.folder, self.engine = settings, folder, engine
        self.texts = texts
        spec = cast(HeadHost, target).spec
        self.layers = layers_of(engine)
        self.features = Features(target, self.layers, settings.steps)
        self.device = self.features.device
        self._dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32  # of products
        count = len(texts.tokens) - settings.held_out
        taught = Texts(texts.tokens[:count], texts.num_prompts[:count])
        self.ids = most_said(taught, settings.vocabulary, spec.num_columns)
        chosen = None if self.ids is None else torch.tensor(self.ids, device=self.device)
        self._matrix = output_of(target, chosen).t().to(self._dtype).contiguous()
        self._own = torch.full((spec.num_columns,), -1, dtype=torch.int64)
        self._own[torch.arange(spec.num_columns) if self.ids is None else torch.tensor(self.ids)] = torch.arange(
            spec.num_columns if self.ids is None else len(self.ids)
        )
        self._own = self._own.to(self.device)
        torch.manual_seed(settings.seed)
        self.net = EagleNet(head_spec(spec), len(self.layers)).to(self.device)
        self.optimizer = Optimizer(self.net)
        self.update = 0
        self.made_for = {"name": target.info.name, "fingerprint": target.fingerprint}
        if (folder / CHECKPOINT).exists():
            self._resume(folder / CHECKPOINT)
        elif settings.start is not None:
            check_beginning(engine, settings, folder)
            begin_with(self.net, Path(settings.start))

    def run(self, report: Callable[[Report], None], *, until: int | None = None) -> None:
        """To the last update, or to number `until` (and then it can go on another time)."""
        settings, begun = self.settings, self.update
        started, seen = time.perf_counter(), list[Tensor]()
        last = settings.updates if until is None else min(until, settings.updates)
        for chosen in self._batches(last):
            batch = self._features(chosen)
            loss, outputs = self.losses(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), settings.clip)
            self.optimizer.step(settings.rate * _rate(self.update, settings))
            self.update += 1
            seen.append(loss.detach())
            is_last = self.update == last
            is_saved = self.update % settings.save_every == 0 or is_last
            if is_saved:
                self.save()
            if len(seen) == REPORTED or is_saved:
                spent = time.perf_counter() - started
                left = spent / (self.update - begun) * (settings.updates - self.update)
                mean, kept = float(torch.stack(seen).mean()), self.kept(batch, outputs)
                report(Report(self.update, mean, kept, left, self.held() if is_saved else None))
                seen = []
        self.write(self.folder)

    def losses(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss, and the outputs of each step. [B * T, width]"""
        settings, steps, rows = self.settings, self.settings.steps, self._rows(batch)
        length, width = batch.tokens.shape[1] - 1 - steps, self._matrix.shape[1]
        outputs: list[Tensor] = []
        with self._precision(), _attention(self.device):
            hidden = self.net.fuse(batch.states[:, :length, :-width])
            embedded = self.features.embed(batch.tokens).to(hidden.dtype)
            final = batch.states[..., -width:].flatten(0, 1)[rows.places]
            with torch.autocast(self.device.type, enabled=False):
                wanted = pull_of(final.to(self._dtype), self._matrix, settings.certain)
            said = self._own[batch.tokens.flatten()[rows.places + 1]]
            right = self._begun(rows, batch)  # entries all of whose guesses were what the text says
            past, total, weight = Past([], []), torch.zeros((), device=self.device), 0.0
            for step, count in enumerate(rows.reach):
                hidden = self.net(embedded[:, 1 + step : 1 + step + length], hidden, step, past)
                outputs.append(hidden.flatten(0, 1))
                entries = rows.entries[:count] - step
                guesses, weights = self.net.normed(outputs[-1][entries]), right[entries].clamp(min=settings.strayed)
                with torch.autocast(self.device.type, enabled=False):
                    missed, guessed = missed_by(guesses, wanted[:count], self._matrix, weights)
                right = torch.zeros_like(right).index_copy_(0, entries, right[entries] * (guessed == said[:count]))
                share = settings.decay**step
                total, weight = total + share * missed / max(1, count), weight + share
        return total / weight, [output.detach() for output in outputs]

    def kept(self, batch: Batch, outputs: Sequence[Tensor]) -> list[float]:
        """The share of places where all guesses up to each step are what the target says."""
        rows, width, kept = self._rows(batch), self._matrix.shape[1], []
        size = at_once(self.features.target.spec.num_columns)
        with torch.no_grad():
            final = batch.states[..., -width:].flatten(0, 1)[rows.places]
            said = self._own[_likeliest(final, self.features.target.unembed, size)]
            right = begun = self._begun(rows, batch) > 0
            with self._precision():
                for step, count in enumerate(rows.reach):
                    entries = rows.entries[:count] - step
                    guessed = _likeliest(outputs[step][entries], self._logits, size)
                    right, before = torch.zeros_like(right), right
                    right[entries] = before[entries] & (guessed == said[:count])
                    kept.append(float(right.sum() / begun[entries].sum().clamp(min=1)))
        return kept

    def _begun(self, rows: Rows, batch: Batch) -> Tensor:
        """1 for entries that guess what the target said from their first step on. [B * T]"""
        size, count = batch.tokens.shape[1] - 1 - self.settings.steps, len(batch.tokens)
        begun = torch.zeros(count * size, device=self.device)
        return begun.index_fill_(0, rows.entries[: rows.reach[0]], 1.0)

    def held(self) -> list[float] | None:
        """`kept` of the texts that are not trained on."""
        first = len(self.texts.tokens) - self.settings.held_out
        numbers = [number for number in range(first, len(self.texts.tokens)) if self._is_usable(number)]
        if not numbers:
            return None
        sums, weight = np.zeros(self.settings.steps), 0
        with torch.no_grad():
            for chosen in plan(
                [len(self.texts.tokens[one]) for one in numbers], self.settings.tokens, 0, 0, HELD_BATCHES
            ):
                batch = self._features([numbers[one] for one in chosen])
                count = self._rows(batch).reach[0]
                sums += count * np.asarray(self.kept(batch, self.losses(batch)[1]))
                weight += count
        return [float(share) for share in sums / weight]

    def _logits(self, outputs: Tensor) -> Tensor:
        return functional.linear(self.net.normed(outputs).to(self._dtype), self._matrix)

    def _rows(self, batch: Batch) -> Rows:
        size, steps = batch.tokens.shape[1], self.settings.steps
        length = size - 1 - steps
        texts = np.concatenate([np.full(max(0, count - first), row) for row, (count, first) in enumerate(_ends(batch))])
        places = np.concatenate([np.arange(first - 1, count - 1) for count, first in _ends(batch)])
        order = np.argsort(-np.minimum(places, steps), kind="stable")  # near a beginning some steps have no entry
        texts, places = texts[order], places[order]
        reach = [int((places >= 1 + step).sum()) for step in range(steps)]
        return Rows(
            torch.from_numpy(texts * length + places - 1).to(self.device),
            torch.from_numpy(texts * size + places).to(self.device),
            reach,
        )

    def _precision(self) -> Any:
        return torch.autocast(self.device.type, self._dtype, enabled=self._dtype == torch.bfloat16)

    def _features(self, chosen: Sequence[int]) -> Batch:
        texts = [self.texts.tokens[number] for number in chosen]
        return self.features.of(texts, [self.texts.num_prompts[number] for number in chosen], chosen)

    def _is_usable(self, number: int) -> bool:
        return len(self.texts.tokens[number]) >= self.settings.steps + 4

    def _batches(self, last: int) -> Iterator[list[int]]:
        settings = self.settings
        usable = [number for number in range(len(self.texts.tokens) - settings.held_out) if self._is_usable(number)]
        if not usable:
            raise ConfigError("no text is long enough to train on; ask for longer answers", param="max_tokens")
        lengths = [len(self.texts.tokens[number]) for number in usable]
        for chosen in plan(lengths, settings.tokens, settings.seed, self.update, last):
            yield [usable[place] for place in chosen]

    def save(self) -> None:
        """A checkpoint, whole or not at all."""
        beside = self.folder / f"{CHECKPOINT}.tmp"
        torch.save(
            {
                "update": self.update,
                "net": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "made_for": self.made_for["fingerprint"],
            },
            beside,
        )
        beside.replace(self.folder / CHECKPOINT)

    def write(self, folder: Path) -> None:
        """The head as it is now."""
        target: Any = self.engine.loop.target
        write_head(
            folder, self.net, target.spec,
            layers=self.layers, ids=self.ids, context=target.info.context, made_for=self.made_for,
        )  # fmt: skip

    def _resume(self, path: Path) -> None:
        held = torch.load(path, map_location=self.device, weights_only=True)
        if held["made_for"] != self.made_for["fingerprint"]:
            raise ConfigError(f"{path} was begun with other weights of the model; choose another --out", param="out")
        self.net.load_state_dict(held["net"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.update = held["update"]


def _attention(device: torch.device) -> Any:
    """On a GPU one that takes masks and every size: others build something for each new size, which takes longer than
    ten updates."""
    return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if device.type == "cuda" else nullcontext()


def _ends(batch: Batch) -> list[tuple[int, int]]:
    return [(count, max(1, first)) for count, first in zip(batch.counts, batch.firsts, strict=True)]


def _likeliest(rows: Tensor, logits: Callable[[Tensor], Tensor], size: int) -> Tensor:
    return torch.cat([logits(part).argmax(-1) for part in torch.split(rows, size)])


def layers_of(engine: Engine) -> tuple[int, ...]:
    """After which layers a head for the engine's target reads; a ConfigError where there can be none."""
    target: Any = engine.loop.target
    if not target.info.heads or not hasattr(target, "spec"):
        raise ConfigError(f"an EAGLE head cannot sit on {target.info.name}; train one for a transformer", param="model")
    spec = cast(HeadHost, target).spec
    head = EagleSpec(version=3, layer=spec, target_width=spec.width, features=None, draft_vocab_size=1)
    layers = head.layers_of(spec.num_layers)
    if layers[0] < 1 or sorted(set(layers)) != list(layers):
        raise ConfigError(
            f"an EAGLE-3 head reads three layers apart, and {target.info.name} has {spec.num_layers}; "
            "take one with 7 or more",
            param="model",
        )
    return layers


def check_beginning(engine: Engine, settings: TrainSettings, folder: Path) -> None:
    """A run that is not under way yet can begin as its settings say; else a ConfigError, or a ModelFileError."""
    if settings.start is None or (folder / CHECKPOINT).exists():
        return
    target: Any = engine.loop.target
    if Path(settings.start).resolve() == folder.resolve():
        raise ConfigError(f"{folder} cannot be begun with itself; choose another --out", param="start")
    check_start(Path(settings.start), target.fingerprint, target.spec.num_layers, layers_of(engine))


def most_said(texts: Texts, count: int | None, num_columns: int) -> list[int] | None:
    """Tokens that the target says most often, in order of their ids; None for all."""
    if count is None or count >= num_columns:
        return None
    said = np.zeros(num_columns, dtype=np.int64)
    for text, first in zip(texts.tokens, texts.num_prompts, strict=True):
        np.add.at(said, text[first:], 1)
    chosen: list[int] = np.sort(np.argsort(-said, kind="stable")[:count]).tolist()
    return chosen


def _rate(update: int, settings: TrainSettings) -> float:
    """Rises, then falls along a cosine."""
    rising = max(1, round(settings.warmup * settings.updates))
    if update < rising:
        return (update + 1) / rising
    share = (update - rising) / max(1, settings.updates - rising)
    return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * share))
