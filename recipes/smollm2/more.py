"""More texts for a head that was trained before: `python recipes/smollm2/more.py MODEL TEXTS OUT [SHARE]`.

TEXTS is the `texts.npz` of that run, OUT the one of the run to come. New prompts are answered greedily, those of TEXTS
again, at a temperature; all of TEXTS comes along, and what was held out there stays last. With a SHARE of 0 nothing is
asked: sums come twice, and that is all.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from prompts import read_words

from outrider import Engine
from outrider.train.settings import TrainSettings
from outrider.train.texts import SCHEDULING, Texts, answer, invented

CHATS, ASKED, AGAIN = 12800, 17200, 20000
QUESTIONS = 21  # of the beginnings, the first, come three times as often: short questions
HELD_OUT, MAX_TOKENS, LENGTH = 512, 192, 1088
SUM = range(40, 220), 3  # tokens of a prompt that asks for a sum, and digits in it


def gathered(model: str, before: Texts, share: float, seed: int) -> Texts:
    """New prompts, and some of those before, by turns: every second answer is greedy."""
    dice, count = random.Random(seed), len(before.tokens) - HELD_OUT
    beginnings = read_words()["beginnings"]
    beginnings += 2 * beginnings[:QUESTIONS]
    settings = TrainSettings(model=model, max_tokens=MAX_TOKENS, length=LENGTH, seed=seed << 20)
    with Engine.load(model, draft="none", scheduling=SCHEDULING, cache_tokens=2**18) as engine:
        new = invented(engine, round(share * CHATS), (seed + 1) << 24)
        new += invented(engine, round(share * ASKED), (seed + 2) << 24, beginnings=beginnings)
        dice.shuffle(new)
        known = dice.sample(range(count), min(count, round(share * AGAIN)))
        old = [before.tokens[number][: before.num_prompts[number]] for number in known]
        prompts = [prompt for pair in zip(new, old, strict=False) for prompt in pair] + new[len(old) :]
        return answer(engine, prompts, settings, lambda done, of: sys.stderr.write(f"{done}/{of} answers\n"))


def with_sums_twice(model: str, before: Texts) -> Texts:
    """Questions with several digits."""
    with Engine.load(model, draft="none") as engine:
        digits = {engine.encode(str(digit))[-1] for digit in range(10)}
        asks = engine.encode("Why?")[-1]
    lengths, least = SUM
    found = Texts([], [])
    for text, first in list(zip(*before, strict=True))[: len(before.tokens) - HELD_OUT]:
        is_question = asks in text[first - 8 : first]
        if first in lengths and is_question and sum(token in digits for token in text[:first]) >= least:
            found.tokens.append(text)
            found.num_prompts.append(first)
    return found


def main(model: str, texts: str, out: str, share: str = "1.0", seed: int = 1) -> None:
    before = Texts.load(Path(texts))
    if len(before.tokens) <= HELD_OUT:
        sys.exit(f"{texts} has {len(before.tokens)} texts, and the last {HELD_OUT} are held out; name a larger one")
    more = gathered(model, before, float(share), seed) if float(share) else with_sums_twice(model, before)
    whole = Texts([*more.tokens, *before.tokens], [*more.num_prompts, *before.num_prompts])
    whole.save(Path(out))
    sys.stderr.write(f"{len(more.tokens)} more texts, {len(whole.tokens)} in {out}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
