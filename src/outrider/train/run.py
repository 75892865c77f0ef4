"""The whole of it: texts, updates, the head, and how good it is on prompts that it was not trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.train.eagle import EagleTrainer, Report, check_beginning, layers_of
from outrider.train.headfile import note_kept
from outrider.train.settings import TrainSettings, check_same
from outrider.train.texts import FILE as TEXTS
from outrider.train.texts import SCHEDULING, Texts, answer, invented, longest_prompt, prompts_from

CURVE = "progress.jsonl"  # how good the head was at each checkpoint
CHAIN = 5  # drafts of a round, in evaluation

Say = Callable[[str], None]


class Evaluation(NamedTuple):
    """Of greedy answers to prompts that were held out."""

    tokens_per_round: float
    kept_by_place: list[float]
    num_prompts: int


def train(
    settings: TrainSettings, folder: Path, *, device: str = "auto", say: Say, report: Callable[[Report], None]
) -> Evaluation | None:
    """Goes on where a run in the same folder was broken off."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder for the head", param="out")
    folder.mkdir(parents=True, exist_ok=True)
    check_same(folder, settings)
    loading: dict[str, Any] = {"draft": "none", "device": device, "backend": "torch", "scheduling": SCHEDULING}
    # half of those who answer at once may be as long as can be: most are shorter, and others wait
    room = max(2 * settings.tokens, SCHEDULING.max_batch // 2 * (settings.length + settings.max_tokens))
    # without a thread: training makes passes of the target itself
    with Engine.load(settings.model, cache_tokens=room, threaded=False, **loading) as engine:
        layers_of(engine)  # says so now where no head can sit, not after an hour of answers
        check_beginning(engine, settings, folder)  # the same
        texts = gather(engine, settings, folder, say)
        trainer = EagleTrainer(engine, texts, settings, folder)
        say(f"{len(texts.tokens)} texts, {sum(map(len, texts.tokens))} tokens; update {trainer.update} is next")

        def told(one: Report) -> None:
            if one.held is not None:
                with (folder / CURVE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"update": one.update, "loss": one.loss, "held_out": one.held}) + "\n")
            report(one)

        trainer.run(told)
    held = [text[:first] for text, first in list(zip(*texts, strict=True))[len(texts.tokens) - settings.held_out :]]
    if not held:
        return None
    found = evaluate(settings.model, folder, held, settings.max_tokens, device=device)
    note_kept(folder, found.kept_by_place)
    return found


def gather(engine: Engine, settings: TrainSettings, folder: Path, say: Say) -> Texts:
    """Prompts and the target's answers; kept, since they take long."""
    if (folder / TEXTS).exists():
        settings.save(folder)
        return Texts.load(folder / TEXTS)
    if settings.prompts:
        prompts = prompts_from(engine, settings.prompts, settings.num_prompts)
    else:
        prompts = invented(engine, settings.num_prompts, settings.seed, lambda done, of: say(f"{done}/{of} prompts"))
    too_long = sum(len(prompt) > longest_prompt(settings) for prompt in prompts)
    if too_long:
        say(f"{too_long} of {len(prompts)} prompts are left out: with an answer they have more than {settings.length} "
            "tokens (--length)")  # fmt: skip
    texts = answer(engine, prompts, settings, lambda done, of: say(f"{done}/{of} answers"))
    if len(texts.tokens) <= settings.held_out:
        raise ConfigError(
            f"{len(texts.tokens)} prompts were answered, and {settings.held_out} are held out; give more",
            param="prompts",
        )
    settings.save(folder)  # from here on it is a run that can be gone on with
    texts.save(folder / TEXTS)
    return texts


def evaluate(
    model: str,
    head: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    device: str = "auto",
    width: int = CHAIN,
) -> Evaluation:
    """By the engine itself, with the head as it was written."""
    with Engine.load(model, draft=f"eagle:{head}", device=device, backend="torch", width=width) as engine:
        engine.generate([list(prompt) for prompt in prompts], temperature=0.0, max_tokens=max_tokens)
        seen = engine.statistics
        return Evaluation(seen.tokens_per_draft_round, seen.accepted_by_position, len(prompts))
