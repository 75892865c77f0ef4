"""Prompts of many kinds for the head of the default model: `python recipes/smollm2/prompts.py MODEL OUT [QUESTIONS]`.

Most are invented by the model itself; QUESTIONS is a .jsonl file with more of them (GSM8K's training questions).
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from outrider import Engine
from outrider.train.texts import SCHEDULING, invented

CHATS, ASKED, TRANSLATIONS, TEXTS, MATHS = 14000, 14000, 3000, 5000, 6000
LANGUAGES = {"german": 6, "french": 1, "spanish": 1}  # how often each is to be translated
LONGEST = 480  # tokens of an article
Words = dict[str, list[str]]


def read_words() -> Words:
    words: Words = {}
    for line in (Path(__file__).parent / "wording.txt").read_text(encoding="utf-8").split("\n"):
        if line.startswith("["):
            words[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            list(words.values())[-1].append(line.replace("\\n", "\n"))
    return words


def sentence(language: str, words: Words, dice: random.Random) -> str:
    who, does, more = (dice.choice(words[f"{language} {part}"]) for part in ("who", "does", "more"))
    if language != "german":
        return f"{who} {does}{more}"
    verb, rest = does.split("/")
    when = dice.choice(words["german when"])
    if dice.random() < 0.25:  # the time first: verb and subject change places, and the article is small
        return f"{when[0].upper()}{when[1:]} {verb} {who[0].lower()}{who[1:]} {rest}{more}"
    return f"{who} {verb} {when} {rest}{more}"


def translation(words: Words, dice: random.Random) -> str:
    language = dice.choices(list(LANGUAGES), weights=list(LANGUAGES.values()))[0]
    sentences = [sentence(language, words, dice) for _ in range(dice.choice((1, 1, 1, 2)))]
    return dice.choice(words[f"asked {language}"]).format(" ".join(sentences))


def main(model: str, out: str, *files: str, share: float = 1.0, seed: int = 0, device: str = "auto") -> None:
    words, dice, started = read_words(), random.Random(seed), time.monotonic()
    prompts: list[dict[str, object]] = []

    def count(number: int) -> int:
        return max(1, round(share * number))

    def tell(what: str) -> None:
        sys.stderr.write(f"{what}, {time.monotonic() - started:.0f} s\n")

    with Engine.load(model, draft="none", device=device, scheduling=SCHEDULING, cache_tokens=2**18) as engine:
        for beginnings, wanted in (([""], CHATS), (words["beginnings"], ASKED)):
            prompts += [
                {"tokens": tokens} for tokens in invented(engine, count(wanted), seed << 20, beginnings=beginnings)
            ]
            tell(f"{len(prompts)} prompts")
        asked = [dice.choice(words["articles"]).format(dice.choice(words["topics"])) for _ in range(count(TEXTS))]
        requests = [engine.encode_chat([{"role": "user", "content": one}]) for one in asked]
        articles = [one.text.strip() for one in engine.generate(requests, temperature=0.9, max_tokens=LONGEST, width=0)]
        tell(f"{len(articles)} articles")
    for number, article in enumerate(articles):
        text = article if number % 3 else f"{article}\n\n{articles[number - 1]}"
        prompts.append({"prompt": dice.choice(words["summaries" if number % 2 else "questions"]).format(text)})
    prompts += [{"prompt": translation(words, dice)} for _ in range(count(TRANSLATIONS))]
    for name in files:
        lines = Path(name).read_text(encoding="utf-8").strip().split("\n")
        prompts += [json.loads(line) for line in dice.sample(lines, min(len(lines), count(MATHS)))]
    dice.shuffle(prompts)
    Path(out).write_text("".join(json.dumps(one) + "\n" for one in prompts), encoding="utf-8")
    tell(f"{len(prompts)} prompts in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
