"""Prompts of several kinds of work: acceptance depends on what is written more than on anything else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from outrider.errors import ConfigError

Work = Mapping[str, list[str]]  # kind -> prompts, each the first turn of a chat

_MEETING = """The council met on Tuesday to decide about the old harbour bridge. The bridge, built in 1931, carries two
lanes and a tram line, and its eastern pillars have been losing concrete since the flood of 2019. The
engineer's report names three ways: a repair for 14 million that keeps the bridge for twenty years, a new
bridge beside the old one for 61 million, or a tunnel for 140 million. The mayor favours the new bridge
because the old one could carry bicycles afterwards. The treasurer warned that the city can borrow no more
than 40 million before 2028. Residents of the eastern bank asked that the tram keep running during the work,
since 9,000 people use it every day. The council asked for a second report on the cost of keeping the tram
running and will vote in March."""

_RECIPE = """Ingredients: 500 g flour, 325 ml water, 10 g salt, 3 g dry yeast. Mix flour, water and yeast and let it
rest for half an hour. Add the salt, knead for ten minutes, cover the bowl and let it rise for two hours in a
warm place. Shape a loaf, let it rise for another hour, cut the top, and bake it at 240 degrees for 15 minutes
and at 200 degrees for 25 more."""

_PASSAGES = """[1] The Kesten canal was dug between 1868 and 1874 and joins the river Ohm to the northern lake. It has
eleven locks.
[2] In 1951 the canal was closed for freight, because the railway beside it was cheaper.
[3] Since 1987 the canal has been open to pleasure boats from April to October; a passage takes two days."""

_CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount"""

OWN: Work = {
    "chat": [
        "Suggest three ways to spend a rainy Sunday in a small town.",
        "Write a short letter to a neighbour asking him to practise the trumpet earlier in the evening.",
    ],
    "story": [
        "Tell a story about a lighthouse keeper who finds a message in a bottle.",
        "Once upon a time there was a little girl who had a red kite. Go on with the story.",
    ],
    "translation": [
        "Translate German to English: Der alte Mann ging jeden Morgen mit seinem Hund am Fluss spazieren.",
        "Translate French to English: Les enfants ont construit une cabane dans le jardin de leur grand-mère.",
    ],
    "summary": [f"Summarize: {_MEETING}", f"Summarize in two sentences: {_RECIPE}"],
    "question": ["Which planet has the most moons?", "Who wrote the novel Moby-Dick, and when did it appear?"],
    "maths": [
        "A train leaves at 9:40 and arrives at 13:05. It stops for 25 minutes on the way. How long does it move?",
        "Anna buys 3 notebooks at 4 euros and 5 pens at 2 euros. She pays with 50 euros. What is her change?",
    ],
    "extraction": [
        f"{_MEETING}\n\nQuote the sentence about the treasurer, then the sentence about the mayor.",
        f"{_RECIPE}\n\nRepeat the recipe, but double every amount.",
    ],
    "code": [
        f"Add a method transfer(self, other, amount) to this class and print the whole class:\n\n{_CODE}",
        "Write a Python function that reads a CSV file and returns the sum of each column.",
    ],
    "retrieval": [
        f"Answer from these passages and name the passage: {_PASSAGES}\n\nWhy was the canal closed for freight?",
        f"Answer from these passages and name the passage: {_PASSAGES}\n\nWhen can a boat pass the canal today?",
    ],
}


def read_work(path: Path) -> Work:
    """JSON lines with `category` and `turns`, as Spec-Bench has them."""
    work: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}", param="prompts") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        turns = entry.get("turns") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or not turns or "category" not in entry:
            raise ConfigError(
                f'{path}, line {number}: a line is an object like {{"category": "chat", "turns": ["Hello"]}}',
                param="prompts",
            )
        work.setdefault(str(entry["category"]), []).append(str(turns[0]))
    if not work:
        raise ConfigError(f"{path} holds no prompts", param="prompts")
    return work
