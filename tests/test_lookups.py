"""Lookups against brute force; tenants apart; memory that stays where it was set; rewinding; trees."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from outrider.backends.mock import MockBackend
from outrider.config import MockConfig, NgramConfig, SuffixConfig
from outrider.draft.certain import LATER, PORTION, SHARE, LookupDrafter
from outrider.draft.ngram import NgramDrafter
from outrider.draft.past import BLOCK, Past, Text
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.types import Batch, Job, Request, SamplingParams, Scores, Verdicts

ALL = 10_000  # occurrences: more than there are
SMALL = SuffixConfig(max_tokens=4096, occurrences=ALL, min_probability=0.0717, smoothing=0.93, factor=3.0)

tokens_of = st.lists(st.integers(0, 3), min_size=1, max_size=40)
# Long enough for several blocks, with repeats of every length.
long_tokens = st.builds(
    lambda seed, length, size: _babble(random.Random(seed), length, size),
    st.integers(0, 10**6),
    st.integers(1, 300),
    st.integers(1, 6),
)


def _babble(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    text: list[int] = []
    while len(text) < length:
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randrange(1, 30)]
        text.append(rng.randrange(vocab_size))
    return text[:length]


def job_of(tokens: Sequence[int], tenant: str = "") -> Job:
    return Job(
        request=Request(prompt=list(tokens), tenant=tenant),
        request_id="",
        params=SamplingParams(),
        tokens=list(tokens),
        num_prompt=len(tokens),
        seed=0,
        rule="rejection",
        words=(0, 0),
        limit=10**6,
        stop_ids=frozenset(),
        arrival=0.0,
        drafters=("ngram", "suffix"),
    )


def observe(drafter: LookupDrafter, *jobs: Job) -> None:
    batch = Batch(prefill=list(jobs), chunks=[0] * len(jobs), decode=[], room=[])
    assert drafter.observe(batch, Scores([], None), Verdicts(None, None)) == 0


def read_all(drafter: LookupDrafter, job: Job) -> None:
    for _ in range(len(job.tokens) // SHARE + 1):
        drafter.propose([job], [1], [False])


def remember(drafter: LookupDrafter, tokens: Sequence[int], tenant: str = "") -> None:
    """A request that came and went."""
    job = job_of(tokens, tenant)
    read_all(drafter, job)
    drafter.forget(job)


def chain(drafter: LookupDrafter, job: Job, width: int) -> list[int]:
    drafts = drafter.propose([job], [width], [False])
    assert drafts.probs is None and drafts.parents == {} and drafts.counts == [len(drafts.tokens)]
    return drafts.tokens.tolist()


def tree(drafter: LookupDrafter, job: Job, width: int) -> list[tuple[int, ...]]:
    """The path of every node, after a look at the tree's shape."""
    drafts = drafter.propose([job], [width], [True])
    tokens, parents = drafts.tokens.tolist(), drafts.parents.get(0)
    assert len(tokens) <= width and (parents is None or len(parents) == len(tokens))
    paths: list[tuple[int, ...]] = []
    for node, token in enumerate(tokens):
        parent = node - 1 if parents is None else parents[node]
        assert -1 <= parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths), "siblings repeat a token"
    return paths


def repeated(tokens: Sequence[int], start: int, count: int) -> list[int]:
    line = list(tokens[start:])
    while len(line) < count:
        line.append(line[len(line) - (len(tokens) - start)])
    return line[:count]


# n-grams


def naive_ngram(tokens: Sequence[int], width: int, least: int, most: int) -> list[int]:
    for n in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == list(tokens[-n:]):
                return repeated(tokens, end, width)
    return []


@given(tokens_of, st.integers(0, 9), st.integers(1, 3), st.integers(0, 3), st.integers(1, 40))
def test_ngram_is_what_naive_search_finds(tokens: list[int], width: int, least: int, more: int, first: int) -> None:
    drafter = NgramDrafter(NgramConfig(min_n=least, max_n=least + more))
    job = job_of(tokens[:first])
    observe(drafter, job)
    job.tokens = tokens
    assert chain(drafter, job, width) == (naive_ngram(tokens, width, least, least + more) if width else [])


@given(tokens_of, st.integers(1, 16))
def test_ngram_trees_hold_the_chain_and_other_continuations(tokens: list[int], width: int) -> None:
    drafter, job = NgramDrafter(), job_of(tokens)
    paths = tree(drafter, job, width)
    expected = chain(drafter, job, width)
    assert len(paths) == len(expected), "the width is used"
    depth = max(map(len, paths), default=0)
    assert tuple(expected[:depth]) in paths or not paths
    assert depth >= len(expected) - 2 * (width // 4)
    for path in paths:
        n_grams = [tokens[-n:] for n in (1, 2, 3)]
        lines = [
            repeated(tokens, end, width)
            for n, gram in enumerate(n_grams, 1)
            for end in range(n, len(tokens))
            if tokens[end - n : end] == gram
        ]
        assert any(list(path) == line[: len(path)] for line in lines)


def test_ngram_branches() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 3, 9, 9, 9, 1, 2, 3]
    assert chain(NgramDrafter(), job_of(tokens), 8) == [4, 5, 6, 7, 8, 3, 9, 9]
    drafts = NgramDrafter().propose([job_of(tokens)], [8], [True])
    assert drafts.tokens.tolist() == [4, 5, 6, 7, 8, 3, 9, 9] and drafts.parents == {0: [-1, 0, 1, 2, 3, 4, -1, 6]}


# Suffix matching


def naive_lines(
    texts: Sequence[Sequence[int]], own: Sequence[int], width: int, config: SuffixConfig
) -> tuple[int, list[list[int]]]:
    """The longest match and what followed everywhere, latest first; `own` was read last."""
    for length in range(min(config.max_match, len(own)), config.min_match - 1, -1):
        lines = []
        depth = min(width, int(length * config.factor))
        for text in (own, *reversed(texts)):
            for end in range(len(text) - 1, length - 1, -1):
                if list(text[end - length : end]) == list(own[-length:]):
                    lines.append(repeated(text, end, depth) if text is own else list(text[end : end + depth]))
        if lines:
            return length, lines
    return 0, []


def naive_probability(lines: list[list[int]], path: Sequence[int], length: int, config: SuffixConfig) -> float:
    probability = 1.0
    for depth, token in enumerate(path):
        votes = [line[depth] for line in lines if len(line) > depth and line[:depth] == list(path[:depth])]
        if token not in votes:
            return 0.0
        probability *= votes.count(token) / (len(votes) + config.smoothing / (length + depth))
    return probability


def naive_chain(lines: list[list[int]], length: int, config: SuffixConfig) -> list[int]:
    path: list[int] = []
    while True:
        votes = [line[len(path)] for line in lines if len(line) > len(path) and line[: len(path)] == path]
        if not votes:
            return path
        longer = [*path, max(votes, key=lambda token: (votes.count(token), -votes.index(token)))]
        if naive_probability(lines, longer, length, config) < config.min_probability:
            return path
        path = longer


@hypothesis_settings(max_examples=80)
@given(st.lists(long_tokens, max_size=3), long_tokens, st.integers(1, 12), st.integers(1, 3), st.integers(0, 20))
def test_suffix_is_what_naive_counting_finds(
    texts: list[list[int]], own: list[int], width: int, least: int, more: int
) -> None:
    config = replace(SMALL, min_match=least, max_match=least + more)
    drafter, job = SuffixDrafter(config), job_of(own[: len(own) // 2 + 1])
    for text in texts:
        remember(drafter, text)
    read_all(drafter, job)
    job.tokens = own
    read_all(drafter, job)
    length, lines = naive_lines(texts, own, width, config)
    tenant = drafter.past.tenants[""]
    assert drafter.past.find(tenant, own).length == length
    assert len(drafter.past.find(tenant, own).places) == len(lines)
    assert chain(drafter, job, width) == naive_chain(lines, length, config)


@hypothesis_settings(max_examples=60)
@given(st.lists(long_tokens, max_size=3), long_tokens, st.integers(1, 16), st.sampled_from([0.0, 0.93]))
def test_suffix_trees_are_the_likeliest_nodes(
    texts: list[list[int]], own: list[int], width: int, smoothing: float
) -> None:
    config = replace(SMALL, smoothing=smoothing)
    drafter, job = SuffixDrafter(config), job_of(own)
    for text in texts:
        remember(drafter, text)
    read_all(drafter, job)
    length, lines = naive_lines(texts, own, width, config)
    nodes = {tuple(line[:depth]) for line in lines for depth in range(1, len(line) + 1)}
    odds = {path: naive_probability(lines, path, length, config) for path in nodes}
    likely = sorted((odds[path] for path in nodes if odds[path] >= config.min_probability), reverse=True)
    paths = tree(drafter, job, width)
    proposed = [odds[path] for path in paths]
    assert proposed == pytest.approx(sorted(proposed, reverse=True)), "the likeliest first, siblings included"
    assert proposed == pytest.approx(likely[:width])


@given(long_tokens, st.integers(1, 5))
def test_suffix_looks_at_the_latest_occurrences(own: list[int], occurrences: int) -> None:
    config = replace(SMALL, occurrences=occurrences)
    drafter, job = SuffixDrafter(config), job_of(own)
    read_all(drafter, job)
    past = drafter.past
    match = past.find(past.tenants[""], own)
    for size in (8, 4, 2):
        ends = [end for end in range(len(own) - 1, size - 1, -1) if own[end - size : end] == own[-size:]]
        if len(own) >= size and ends:
            break
    else:
        assert match.places == []
        return

    def matched(end: int) -> int:
        length = 0
        while length < min(config.max_match, end) and own[end - length - 1] == own[len(own) - length - 1]:
            length += 1
        return length

    longest = max(map(matched, ends[:occurrences]))
    places = [end for end in ends[:occurrences] if matched(end) == longest]
    assert match.length == longest
    assert past.after(match.places, 1) == [[own[end]] for end in places]


def test_suffix_goes_as_far_as_justified() -> None:
    phrase = list(range(100, 140))
    drafter = SuffixDrafter()
    remember(drafter, phrase)
    assert chain(drafter, job_of([1, *phrase[3:5]]), 16) == phrase[5:9]  # twice as far as two tokens
    assert chain(drafter, job_of([1, *phrase[3:8]]), 16) == phrase[8:18]
    assert chain(drafter, job_of([1, *phrase[3:8]]), 4) == phrase[8:12]
    assert chain(drafter, job_of([2, phrase[3]]), 16) == []  # one token is no match
    cautious = SuffixDrafter(SuffixConfig(min_probability=0.6))
    remember(cautious, phrase)
    assert chain(cautious, job_of([1, *phrase[3:6]]), 16) == phrase[6:8]  # 3/4 * 4/5, then * 5/6
    loop = SuffixDrafter(SuffixConfig(factor=9.0))
    assert chain(loop, job_of([7, 8, 7, 8]), 6) == [7, 8, 7, 8, 7, 8]
    assert chain(loop, job_of([7, 7, 7]), 6) == [7, 7, 7, 7, 7, 7]


def test_running_requests_of_a_tenant_help_each_other_at_once() -> None:
    drafter, first, second = SuffixDrafter(), job_of(range(50, 80)), job_of([1, 55, 56, 57])
    observe(drafter, first, second)
    assert chain(drafter, second, 4) == [58, 59, 60, 61]


# Tenants (R31)


@hypothesis_settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), long_tokens), min_size=2, max_size=6), st.booleans(), st.data())
def test_tenants_never_see_each_other(
    texts: list[tuple[bool, list[int]]], colliding: bool, data: st.DataObject
) -> None:
    """One tenant's text has the same tokens at even places, and its own tokens at odd ones."""
    drafter = SuffixDrafter(replace(SMALL, min_match=1))
    with pytest.MonkeyPatch.context() as patch:
        if colliding:
            patch.setattr("outrider.draft.past.crc32", lambda _: 5)
        jobs = []
        for is_first, tokens in texts:
            mine = [token + (place % 2) * (10 if is_first else 20) for place, token in enumerate(tokens)]
            jobs.append(job_of(mine, "a" if is_first else "b"))
            read_all(drafter, jobs[-1])
            if data.draw(st.booleans()):
                drafter.forget(jobs.pop())
        for tenant, foreign in (("a", range(20, 30)), ("b", range(10, 20)), ("c", range(0, 30))):
            for tokens in ([0], [1], [2, 3], [0, 0]):
                asking = job_of(tokens, tenant)
                own = set(tokens)
                for job in (asking, *(job for job in jobs if job.request.tenant == tenant)):
                    drafted = {token for path in tree(drafter, job, 16) for token in path}
                    assert not drafted & (set(foreign) - own)


def test_a_colliding_hash_of_another_tenant_hides_nothing_and_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.draft.past.crc32", lambda _: 5)
    drafter = SuffixDrafter()
    remember(drafter, [1, 2, 3, 4, 5], "a")
    remember(drafter, [1, 2, 3, 6, 7], "b")
    assert chain(drafter, job_of([9, 1, 2, 3], "a"), 2) == [4, 5]
    assert chain(drafter, job_of([9, 1, 2, 3], "b"), 2) == [6, 7]
    assert chain(drafter, job_of([9, 1, 2, 3], "c"), 2) == []


# Bounds


def check(past: Past, config: SuffixConfig, shadows: dict[Text, list[int]]) -> None:
    """Blocks are free or someone's, bounds hold, and everything held is what was read."""
    texts = [text for text in shadows if text.blocks]
    held = [block for text in texts for block in text.blocks]
    assert len(set(held)) == len(held) and not set(held) & set(past._free)
    assert len(held) + len(past._free) == config.max_tokens // BLOCK
    assert past.num_tokens == len(held) * BLOCK <= config.max_tokens
    assert {text for text in past._texts if text is not None} == set(texts)
    for tenant in list(past.tenants.values()):
        own = sum(len(text.blocks) for text in texts if text.tenant is tenant)
        assert tenant.num_blocks == own <= (config.tenant_tokens or config.max_tokens) // BLOCK
    for text in texts:
        tokens: list[int] = []
        for order, block in enumerate(text.blocks):
            start = block * past._stride
            lead = past._tokens[start : start + config.max_match].tolist()
            assert [token for token in lead if token >= 0] == tokens[-config.max_match :]
            tokens += past._tokens[start + config.max_match : start + past._stride].tolist()
            assert past._owners[block] is text.tenant and past._orders[block] == order
        assert [token for token in tokens if token >= 0] == shadows[text][: text.length]


@pytest.mark.parametrize("seed", range(3))
def test_memory_stays_bounded_and_sound(seed: int) -> None:
    """Hundreds of requests in room for a few, with rewinds: what is found was said, and by the same tenant."""
    rng = random.Random(seed)
    config = SuffixConfig(max_tokens=BLOCK * 12, tenant_tokens=BLOCK * 5, max_match=8, occurrences=5)
    drafter = SuffixDrafter(config)
    past, size = drafter.past, drafter.past.num_bytes
    running: list[Job] = []
    shadows: dict[Text, list[int]] = {}
    for _ in range(600):
        if len(running) < 4 and rng.random() < 0.5:
            running.append(job_of(_babble(rng, rng.randrange(1, 200), 4), f"tenant {rng.randrange(8)}"))
        for job in running:
            if rng.random() < 0.1:
                del job.tokens[rng.randrange(1, len(job.tokens) + 1) :]
                observe(drafter, job)
            job.tokens += _babble(rng, rng.randrange(1, 9), 4)
        observe(drafter, *running)
        shadows |= {drafter.lookups[job.id]._text: list(job.tokens) for job in running}  # type: ignore[attr-defined]
        for job in running:
            text = drafter.lookups[job.id]._text  # type: ignore[attr-defined]
            match = past.find(text.tenant, job.tokens)
            assert len(set(match.places)) == len(match.places)
            for place, line in zip(match.places, past.after(match.places, 20), strict=True):
                found = past.text(place)
                assert found.tenant is text.tenant
                said = shadows[found][: found.length]
                assert any(
                    said[end - match.length : end] == job.tokens[-match.length :] and said[end : end + 20] == line
                    for end in range(match.length, len(said))
                )
            tree(drafter, job, 8)
        if running and rng.random() < 0.4:
            job = running.pop(rng.randrange(len(running)))
            drafter.forget(job)
        shadows = {text: tokens for text, tokens in shadows.items() if text.blocks}
        check(past, config, shadows)
        assert drafter.lookups.keys() == {job.id for job in running}
    assert len(past.tenants) <= 8
    assert past.num_bytes <= size + 2000  # the list of free blocks


def test_the_oldest_finished_text_makes_room() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_tokens=BLOCK * 4, tenant_tokens=BLOCK * 3))
    running = job_of(range(1000, 1000 + BLOCK), "a")
    observe(drafter, running)
    remember(drafter, range(2000, 2000 + BLOCK), "a")
    remember(drafter, range(3000, 3000 + BLOCK), "a")

    def knows(first: int, tenant: str) -> bool:
        known = drafter.past.tenants.get(tenant)
        return known is not None and drafter.past.find(known, [first, first + 1]).length == 2

    assert knows(1000, "a") and knows(2000, "a") and knows(3000, "a")
    remember(drafter, range(4000, 4000 + BLOCK), "a")  # the tenant has its share: its own oldest goes
    assert knows(1000, "a") and not knows(2000, "a") and knows(3000, "a") and knows(4000, "a")
    remember(drafter, range(5000, 5000 + BLOCK), "b")
    remember(drafter, range(6000, 6000 + BLOCK), "b")  # all is full: the oldest of all goes
    assert knows(1000, "a") and not knows(3000, "a") and knows(4000, "a") and knows(5000, "b") and knows(6000, "b")
    drafter.forget(running)
    for start in range(10_000, 20_000, 1000):
        remember(drafter, range(start, start + BLOCK), f"tenant {start}")
    assert not knows(1000, "a") and set(drafter.past.tenants) == {f"tenant {16000 + i * 1000}" for i in range(4)}


def test_running_texts_that_fill_everything_just_stop_being_read() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_tokens=BLOCK * 2))
    jobs = [job_of(range(start, start + BLOCK + 9)) for start in (0, 1000, 2000)]
    for _ in range(3):
        observe(drafter, *jobs)
    assert drafter.past.num_tokens == BLOCK * 2
    assert chain(drafter, job_of([4, 5]), 2) == [6, 7]
    for job in jobs:
        drafter.forget(job)
    remember(drafter, range(5000, 5060))
    assert chain(drafter, job_of([5004, 5005]), 2) == [5006, 5007]


def test_forgetting_frees_everything() -> None:
    drafter = NgramDrafter()
    jobs = [job_of(_babble(random.Random(seed), 500, 50)) for seed in range(4)]
    drafter.propose(jobs, [4] * 4, [False] * 4)
    assert len(drafter.lookups) == 4
    for job in jobs:
        drafter.forget(job)
    drafter.forget(job_of([1]))  # never seen
    assert drafter.lookups == {}
    suffix = SuffixDrafter()
    suffix.forget(job_of([1]))
    suffix.propose(jobs, [4] * 4, [False] * 4)
    for job in jobs:
        suffix.forget(job)
    assert suffix.lookups == {} and suffix.past.num_tokens <= 4 * 512
    for text in list(suffix.past._finished):
        suffix.past.drop(text)
    del text
    assert suffix.past.num_tokens == 0 and not suffix.past.tenants


def test_long_prompts_are_read_in_portions() -> None:
    long, short = job_of(range(5 * PORTION)), job_of(range(LATER))
    for drafter in (NgramDrafter(), SuffixDrafter()):
        observe(drafter, long, short)
        assert drafter.lookups[long.id].missing(long.tokens) == 4 * PORTION
        assert drafter.lookups[short.id].missing(short.tokens) == 0
        short.tokens += range(LATER - 1)
        observe(drafter, short)
        assert drafter.lookups[short.id].missing(short.tokens) == LATER - 1, "soon, and together"
        drafter.propose([short], [1], [False])
        assert drafter.lookups[short.id].missing(short.tokens) == 0, "before something is looked up"
        del short.tokens[LATER:]
        second = job_of(range(2 * PORTION))
        drafter.propose([long, second], [1, 1], [False, False])
        assert drafter.lookups[second.id].missing(second.tokens) == 2 * PORTION - SHARE
        read_all(drafter, long)
        assert drafter.lookups[long.id].missing(long.tokens) == 0
        plain = replace(job_of([1, 2, 3]), drafters=(), id=-1)
        observe(drafter, plain)
        assert (plain.id in drafter.lookups) == (drafter.name == "suffix")  # plain answers are past text too


def test_a_short_answer_is_remembered_though_nobody_asked() -> None:
    drafter, job = SuffixDrafter(), job_of(range(LATER - 1))
    observe(drafter, job)
    drafter.forget(job)
    assert drafter.past.find(drafter.past.tenants[""], [5, 6, 7]).length == 3


def test_memory_does_not_grow_with_what_was_forgotten() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_tokens=BLOCK * 16))
    rng = random.Random(0)
    for turn in range(60):
        if turn == 20:
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
        remember(drafter, _babble(rng, 300, 1000), f"tenant {turn}")
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 100_000


# Rewinding, batches, engines


@hypothesis_settings(max_examples=40)
@given(st.lists(long_tokens, min_size=1, max_size=2), st.data())
def test_tokens_taken_back_leave_no_trace(texts: list[list[int]], data: st.DataObject) -> None:
    own = data.draw(long_tokens)
    for make in (NgramDrafter, lambda: SuffixDrafter(SMALL)):
        drafter, fresh = make(), make()
        job, other = job_of(own), job_of(own)
        for text in texts:
            remember(drafter, text)
            remember(fresh, text)
        read_all(drafter, job)
        for _ in range(2):
            del job.tokens[data.draw(st.integers(1, len(job.tokens))) :]
            observe(drafter, job)
            job.tokens += data.draw(tokens_of)
            read_all(drafter, job)
        other.tokens = list(job.tokens)
        read_all(fresh, other)
        for width in (1, 5, 12):
            assert chain(drafter, job, width) == chain(fresh, other, width)
            assert tree(drafter, job, width) == tree(fresh, other, width)


@hypothesis_settings(max_examples=40)
@given(st.lists(st.tuples(long_tokens, st.integers(0, 9), st.booleans()), min_size=1, max_size=5))
def test_a_batch_is_its_jobs_one_by_one(asked: list[tuple[list[int], int, bool]]) -> None:
    jobs = [job_of(tokens, f"tenant {index % 2}") for index, (tokens, _, _) in enumerate(asked)]
    for drafter in (NgramDrafter(), SuffixDrafter(SMALL)):
        for job in jobs:
            read_all(drafter, job)
        together = drafter.propose(jobs, [width for _, width, _ in asked], [branching for _, _, branching in asked])
        alone = [drafter.propose([job], [width], [b]) for job, (_, width, b) in zip(jobs, asked, strict=True)]
        assert together.counts == [drafts.counts[0] for drafts in alone]
        assert together.tokens.tolist() == [token for drafts in alone for token in drafts.tokens.tolist()]
        assert together.parents == {index: d.parents[0] for index, d in enumerate(alone) if d.parents}
        assert (drafter.info.hidden_layers, drafter.lag(jobs[0])) == ((), 0)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_engines_say_the_same_as_plain_ones(draft: str, is_tree: bool) -> None:
    config = MockConfig(vocab_size=8, seed=3, order=2, sharpness=4.0)
    prompts = [[1, 2, 3, start] for start in (0, 5, 0)]
    plain = Engine.load(MockBackend(config), draft="none").generate(prompts, max_tokens=60, temperature=0.0)
    engine = Engine.load(MockBackend(config), draft=draft, width=6, tree=is_tree)
    for _ in range(2):
        results = engine.generate(prompts, max_tokens=60, temperature=0.0)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert engine.statistics.accepted > 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("min_match", 0),
        ("max_match", 1),
        ("max_match", 65),
        ("occurrences", 0),
        ("factor", 0.0),
        ("factor", math.inf),
        ("smoothing", -1.0),
        ("min_probability", 1.5),
        ("max_tokens", 10),
        ("max_tokens", 10**10),
        ("tenant_tokens", 3),
    ],
)
def test_settings_are_checked(setting: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        SuffixConfig(**{setting: value})  # type: ignore[arg-type]
    assert caught.value.param == f"suffix.{setting}"


def test_bench_measures_lookups() -> None:
    from outrider.bench.lookups import readings

    names = [reading.name for reading in readings(quick=True)]
    assert any("propose a tree" in name for name in names) and any("memory" in name for name in names)
