"""The verbs of a round that are the target's: score, verify, and what follows from the verdict. `router.py` drafts, the
loop puts them in order.

What a backend hands over is checked here, and what it raises becomes a typed error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.backends.base import Backend, Spans
from outrider.errors import BackendError, wrap_errors
from outrider.types import Batch, Drafts, Job, Scores, Slot, Verdicts


def score(
    target: Backend, batch: Batch, drafts: Drafts, hidden: Sequence[int] = (), goes_on: Sequence[int] = ()
) -> Scores:
    """ONE target pass for prompt chunks, pending tokens and drafts alike."""
    spans, info = _spans(target, batch, drafts), target.info
    spans.goes_on = goes_on
    with wrap_errors(BackendError, "the target failed while scoring"):
        scores = target.score(spans, hidden)
        if not isinstance(scores, Scores):
            raise BackendError(f"score() must return Scores, got {type(scores).__name__}")
        scores.fed = spans.counts
        expected, shape = (sum(spans.rows), info.num_columns), tuple(scores.logits.shape)
        if shape != expected:
            raise BackendError(f"the target returned rows of shape {shape}, wanted {expected}", param="logits")
        if info.num_columns != info.vocab_size:
            scores.logits = scores.logits[:, : info.vocab_size]  # padding columns stand for no token
    scores.counts = _rows(target, drafts)
    if sum(scores.counts) != sum(spans.rows):
        _set_apart(target, batch, spans, scores)
    return scores


def _rows(target: Backend, drafts: Drafts) -> list[int]:
    """Rows of each decode job: one after its own tokens and one after each draft that is fed."""
    return [count + 1 for count in drafts.counts] if target.info.max_rewind != 0 else [1] * len(drafts.counts)


def _set_apart(target: Backend, batch: Batch, spans: Spans, scores: Scores) -> None:
    """Rows of prompts that are to be scored go to `scores.read`; those that judge stay."""
    judging: list[int] = []
    wanted = [0] * len(batch.prefill) + scores.counts
    start = 0
    for job, rows, needed in zip(batch.jobs, spans.rows, wanted, strict=True):
        if rows > needed:
            scores.read.append((job, scores.logits[start : start + rows - needed, ...]))
        judging += range(start + rows - needed, start + rows)
        start += rows
    scores.logits = scores.logits[target.ops.integers(judging), ...]


def verify(target: Backend, batch: Batch, drafts: Drafts, scores: Scores) -> Verdicts:
    """The verdict on every decode job."""
    with wrap_errors(BackendError, "sampling failed"):
        verdicts = target.ops.judge(batch.decode, drafts, scores)
    if drafts.faults:
        verdicts.faults = {**verdicts.faults, **drafts.faults}
    return verdicts


def emitted(drafts: Drafts, scores: Scores, verdicts: Verdicts) -> list[list[int]]:
    """The tokens each decode job gets, before stop conditions: accepted drafts, then the next token.

    Each comes from a row, so a job gets at most as many as it has rows.
    """
    following = verdicts.next.tolist()
    if not any(drafts.counts):
        return [[token] for token in following]
    accepted, paths = verdicts.accepted.tolist(), verdicts.paths
    return [
        [*([drafted[node] for node in paths[index]] if index in paths else drafted[: accepted[index]]), token][:rows]
        for index, (drafted, rows, token) in enumerate(zip(drafts.proposals(), scores.counts, following, strict=True))
    ]


def keep(target: Backend, jobs: Sequence[Job], paths: Mapping[Slot, Sequence[int]]) -> None:
    """The target's cache goes back to what was emitted: everything but the last token, which is fed next.

    paths: for jobs whose drafts were a tree, the places of the nodes that stay.
    """
    with wrap_errors(BackendError, "the target failed while rewinding"):
        slots, lengths = [slot_of(job) for job in jobs], [job.cached for job in jobs]
        target.keep(slots, lengths, paths)


def publish(target: Backend, job: Job) -> None:
    """The target may let later sequences start with what this one holds."""
    with wrap_errors(BackendError, "the target failed while sharing its cache"):
        target.publish(slot_of(job), job.tokens[: job.cached])


def _spans(target: Backend, batch: Batch, drafts: Drafts) -> Spans:
    """What the target is fed. A target that cannot rewind is not fed the draft: its last known row judges it."""
    info = target.info
    fed: list[int] = []
    slots: list[Slot] = []
    starts: list[int] = []
    counts: list[int] = []
    rows: list[int] = []
    parents: dict[int, list[int]] = {}
    proposals = [[0] * count for count in drafts.counts] if drafts.device.is_deferred else drafts.proposals()
    places: list[int] = []  # of drafts that only the device knows
    for job, chunk in zip(batch.prefill, batch.chunks, strict=True):
        fed += job.tokens[job.cached : job.cached + chunk]
        slots.append(slot_of(job))
        starts.append(job.cached)
        counts.append(chunk)
        rows.append(chunk if job.prompt_logprobs is not None and job.cached < job.num_prompt - 1 else 0)
    for index, (job, proposal) in enumerate(zip(batch.decode, proposals, strict=True)):
        ahead = proposal if info.max_rewind != 0 else []
        if index in drafts.parents:
            pending = len(job.tokens) - job.cached  # a chain that ends in the root
            tree = [node + pending if node >= 0 else pending - 1 for node in drafts.parents[index]]
            parents[len(slots)] = [*range(-1, pending - 1), *tree]
        fed += job.tokens[job.cached :]
        if drafts.device.is_deferred:
            places += range(len(fed), len(fed) + len(ahead))
        fed += ahead
        slots.append(slot_of(job))
        starts.append(job.cached)
        counts.append(len(job.tokens) - job.cached + len(ahead))
        rows.append(len(ahead) + 1)
        if job.prompt_logprobs is not None and job.cached < job.num_prompt - 1:  # the end of the prompt is in here
            rows[-1] = counts[-1]
    later = (places, drafts.tokens) if places else None
    return Spans(slots, starts, counts, rows, target.ops.fed(fed), parents, later=later, source=drafts.device.source)


def slot_of(job: Job) -> Slot:
    """Of a job that takes part in a pass."""
    assert job.slot is not None, f"job {job.id} takes part in a pass without a slot"
    return job.slot
