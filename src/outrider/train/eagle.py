"""Training an EAGLE-3 head: the target answers prompts, and the head learns to guess what it says, some tokens ahead.

All that a run depends on is in its settings, its texts and its last checkpoint: one that was broken off goes on as if
nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from outrider.backends.base import HeadHost
from outrider.backends.heads import output_of
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.head_spec import EagleSpec
from outrider.train.features import Batch, Features
from outrider.train.headfile import head_spec, write_head
from outrider.train.net import EagleNet, Past
from outrider.train.settings import TrainSettings
from outrider.train.texts import Texts

CHECKPOINT = "checkpoint.pt"
FLOOR = 0.1  # of the highest rate: the last updates learn so fast


class Report(NamedTuple):
    """After some updates: the loss, and how often all guesses up to each step were what the target says."""

    update: int
    loss: float
    kept: list[float]
    seconds_left: float


class EagleTrainer:
    """One run, in `folder`."""

    def __init__(self, engine: Engine, texts: Texts, settings: TrainSettings, folder: Path) -> None:
        target: Any = engine.loop.target
        self.settings, self.folder, self.engine = settings, folder, engine
        self.texts = texts
        spec = cast(HeadHost, target).spec
        self.layers = layers_of(engine)
        self.features = Features(target, self.layers)
        self.device = self.features.device
        count = len(texts.tokens) - settings.held_out
        taught = Texts(texts.tokens[:count], texts.num_prompts[:count])
        self.ids = most_said(taught, settings.vocabulary, spec.num_columns)
        chosen = None if self.ids is None else torch.tensor(self.ids, device=self.device)
        self._matrix = output_of(target, chosen).t().float().clone()
        self._own = torch.full((spec.num_columns,), -1, dtype=torch.int64)
        self._own[torch.arange(spec.num_columns) if self.ids is None else torch.tensor(self.ids)] = torch.arange(
            spec.num_columns if self.ids is None else len(self.ids)
        )
        self._own = self._own.to(self.device)
        torch.manual_seed(settings.seed)
        self.net = EagleNet(head_spec(spec), len(self.layers)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.update = 0
        self.made_for = {"name": target.info.name, "fingerprint": getattr(target, "fingerprint", None)}
        if (folder / CHECKPOINT).exists():
            self._resume(folder / CHECKPOINT)

    def run(self, report: Callable[[Report], None], *, until: int | None = None) -> None:
        """To the last update, or to number `until` (and then it can go on another time)."""
        settings, begun = self.settings, self.update
        started, seen = time.perf_counter(), list[tuple[Tensor, Tensor]]()
        last = settings.updates if until is None else min(until, settings.updates)
        for chosen in self._batches(last):
            for group in self.optimizer.param_groups:
                group["lr"] = settings.rate * _rate(self.update, settings)
            loss, kept = self.losses(self._features(chosen))
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), settings.clip)
            self.optimizer.step()
            self.update += 1
            seen.append((loss.detach(), kept))
            is_last = self.update == last
            if len(seen) == 20 or is_last:
                spent = time.perf_counter() - started
                left = spent / (self.update - begun) * (settings.updates - self.update)
                mean = float(torch.stack([one for one, _ in seen]).mean())
                report(Report(self.update, mean, torch.stack([one for _, one in seen]).mean(0).tolist(), left))
                seen = []
            if self.update % settings.save_every == 0 or is_last:
                self.save()
        self.write(self.folder)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the share of texts' places where all guesses up to each step were right. [steps]"""
        settings, steps = self.settings, self.settings.steps
        length = batch.tokens.shape[1] - 1 - steps
        with self._precision():
            hidden = self.net.fuse(batch.features[:, :length])
            embedded = self.features.embed(batch.tokens).to(hidden.dtype)
            past, total, weight = Past([], []), torch.zeros((), device=self.device), 0.0
            right = torch.ones_like(batch.told[:, :length])
            kept = []
            for step in range(steps):
                first = 1 + step  # entry i has token i + first, and guesses what follows it
                hidden = self.net(embedded[:, first : first + length], hidden, step, past)
                guessed = self.net.rows(hidden, self._matrix.to(hidden.dtype)).float()
                final = batch.final[:, first : first + length].to(hidden.dtype)
                wanted = (final @ self._matrix.to(hidden.dtype).t()).float().softmax(-1)
                counts = batch.told[:, first + 1 : first + 1 + length].float()
                missed = -(wanted * guessed.log_softmax(-1)).sum(-1)
                share = settings.decay**step
                total = total + share * (missed * counts).sum() / counts.sum().clamp(min=1.0)
                weight += share
                likeliest = self._own[batch.likeliest[:, first : first + length]]
                right = right & (guessed.argmax(-1) == likeliest)
                kept.append((right.float() * counts).sum() / counts.sum().clamp(min=1.0))
        return total / weight, torch.stack(kept).detach()

    def _precision(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _features(self, chosen: Sequence[int]) -> Batch:
        texts = [self.texts.tokens[number] for number in chosen]
        return self.features.of(texts, [self.texts.num_prompts[number] for number in chosen])

    def _batches(self, last: int) -> Iterator[list[int]]:
        """Texts of each update from the present one on; which ones depends on the seed and its number alone."""
        settings = self.settings
        usable = [
            number
            for number, text in enumerate(self.texts.tokens[: len(self.texts.tokens) - settings.held_out])
            if len(text) >= settings.steps + 4
        ]
        if not usable:
            raise ConfigError("no text is long enough to train on; ask for longer answers", param="max_tokens")
        per_epoch = max(1, len(usable) // settings.batch)
        for number in range(self.update, last):
            order = np.random.default_rng((settings.seed, number // per_epoch)).permutation(len(usable))
            at = number % per_epoch * settings.batch
            yield [usable[place] for place in order[at : at + settings.batch]]

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
