"""The verbs of a round: draft, score, judge, and what follows from the verdict. The loop puts them in order.

What plug-ins hand over is checked here, and what they raise becomes a typed error.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.backends.base import Backend, ModelInfo, Spans
from outrider.draft.base import Drafter
from outrider.errors import BackendError, DraftError, OutriderError
from outrider.types import Drafts, Job, Plan, Scores, Slot, Verdicts


def propose(drafter: Drafter, target: Backend, plan: Plan) -> Drafts:
    """What the drafter has to say, in the target's arrays. Its failure is one of the jobs that asked for drafts."""
    if not any(plan.widths):
        return _no_drafts(target, plan)
    try:
        with _blaming(DraftError, f"the {drafter.name} draft failed"):
            drafts = drafter.propose(plan.deciding, plan.widths)
            _check_shapes(drafter, target.info, plan, drafts)
            drafts = target.ops.adopt(drafts)
            _check_values(drafter, target, drafts)
            return drafts
    except DraftError as error:
        failed = _no_drafts(target, plan)
        failed.faults = {index: error.copy() for index, width in enumerate(plan.widths) if width}
        return failed


def _no_drafts(target: Backend, plan: Plan) -> Drafts:
    return Drafts([0] * len(plan.deciding), target.ops.integers([]))


def score(target: Backend, plan: Plan, drafts: Drafts) -> Scores:
    """ONE target pass for prompt chunks, pending tokens and drafts alike."""
    spans, info = _spans(target, plan, drafts), target.info
    with _blaming(BackendError, "the target failed while scoring"):
        scores = target.score(spans)
        if not isinstance(scores, Scores):
            raise BackendError(f"score() must return Scores, got {type(scores).__name__}")
        scores.counts = [rows for rows in spans.rows if rows]
        scores.num_fed = sum(spans.counts)
        expected, shape = (sum(spans.rows), info.num_columns), tuple(scores.logits.shape)
        if shape != expected:
            raise BackendError(f"the target returned rows of shape {shape}, wanted {expected}", param="logits")
        if info.num_columns != info.vocab_size:
            scores.logits = scores.logits[:, : info.vocab_size]  # padding columns stand for no token
    return scores


def judge(target: Backend, plan: Plan, drafts: Drafts, scores: Scores) -> Verdicts:
    """The verdict on every deciding job."""
    with _blaming(BackendError, "sampling failed"):
        verdicts = target.ops.judge(plan.deciding, drafts, scores)
    if drafts.faults:
        verdicts.faults = {**verdicts.faults, **drafts.faults}
    return verdicts


def emitted(drafts: Drafts, scores: Scores, verdicts: Verdicts) -> list[list[int]]:
    """The tokens each deciding job gets, before stop conditions: accepted drafts, then the next token.

    Each comes from a row, so a job gets at most as many as it has rows.
    """
    following = verdicts.next.tolist()
    if not any(drafts.counts):
        return [[token] for token in following]
    accepted = verdicts.accepted.tolist()
    return [
        [*drafted[:kept], token][:rows]
        for drafted, rows, kept, token in zip(drafts.proposals(), scores.counts, accepted, following, strict=True)
    ]


def keep(target: Backend, jobs: Sequence[Job]) -> None:
    """The target's cache goes back to what was emitted: everything but the last token, which is fed next."""
    with _blaming(BackendError, "the target failed while rewinding"):
        target.keep([_slot(job) for job in jobs], [job.cached for job in jobs])


def publish(target: Backend, job: Job) -> None:
    """The target may let later sequences start with what this one holds."""
    with _blaming(BackendError, "the target failed while sharing its cache"):
        target.publish(_slot(job), job.tokens[: job.cached])


def observe(drafter: Drafter, plan: Plan, scores: Scores, verdicts: Verdicts) -> int:
    """The drafter sees what came of its proposals. Returns the passes that took."""
    with _blaming(DraftError, f"the {drafter.name} draft failed"):
        steps = drafter.observe(plan, scores, verdicts)
        if not isinstance(steps, int):
            raise DraftError(f"observe() must return the number of passes it made, got {steps!r}; return 0 for none")
        return steps


class _blaming:  # noqa: N801
    """Names who failed. A class, since a generator-based context costs four times as much, several times a round."""

    __slots__ = ("_error", "_what")

    def __init__(self, error: type[OutriderError], what: str) -> None:
        self._error = error
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if isinstance(cause, Exception) and not isinstance(cause, self._error):
            lines = str(cause).strip().splitlines() or [""]  # of a long report the last line says what happened
            raise self._error(f"{self._what}: {type(cause).__name__}: {lines[-1]}") from cause


def _check_shapes(drafter: Drafter, info: ModelInfo, plan: Plan, drafts: Drafts) -> None:
    """Drafts come from plug-ins too: they must fit what was asked for."""
    name, widths, counts = drafter.name, plan.widths, drafts.counts
    if len(counts) != len(widths) or not all(0 <= c <= w for c, w in zip(counts, widths, strict=True)):
        raise DraftError(f"the {name} draft proposed {counts} tokens where {widths} were allowed")
    total, shape = sum(counts), tuple(drafts.tokens.shape)
    if shape != (total,) or "int" not in str(drafts.tokens.dtype):
        raise DraftError(
            f"the {name} draft gave {drafts.tokens.dtype} tokens of shape {shape} for {total} whole numbers"
        )
    if drafts.probs is not None and tuple(drafts.probs.shape) != (total, info.vocab_size):
        given, wanted = tuple(drafts.probs.shape), (total, info.vocab_size)
        raise DraftError(f"the {name} draft gave rows of shape {given}, wanted {wanted}", param="probs")
    if not all(isinstance(job, Job) and isinstance(reason, str) for job, reason in drafts.fallbacks):
        raise DraftError(f"the {name} draft gave fallbacks that are not (job, reason) pairs")


def _check_values(drafter: Drafter, target: Backend, drafts: Drafts) -> None:
    """Tokens must be in the vocabulary and rows be distributions, or the law would break without a word.

    A job whose proposal is wrong fails alone; zeros stand in for what is no token until it is dropped.
    """
    if not any(drafts.counts):
        return
    size, tokens, start = target.info.vocab_size, drafts.tokens.tolist(), 0
    sound = [True] * len(tokens) if drafts.probs is None else target.ops.are_distributions(drafts.probs)
    if all(sound) and min(tokens) >= 0 and max(tokens) < size:
        return
    for index, count in enumerate(drafts.counts):
        wrong = [token for token in tokens[start : start + count] if not 0 <= token < size]
        if wrong:
            message = f"the {drafter.name} draft proposed token {wrong[0]}; ids run from 0 to {size - 1}"
            drafts.faults[index] = DraftError(message, param="draft")
        elif not all(sound[start : start + count]):
            message = f"the {drafter.name} draft gave rows that are no distributions; they must be >= 0 and sum to 1"
            drafts.faults[index] = DraftError(message, param="probs")
        start += count
    drafts.tokens = target.ops.integers([token if 0 <= token < size else 0 for token in tokens])


def _spans(target: Backend, plan: Plan, drafts: Drafts) -> Spans:
    """What the target is fed. A target that cannot rewind is not fed the draft: its last known row judges it."""
    info = target.info
    fed: list[int] = []
    slots: list[Slot] = []
    starts: list[int] = []
    counts: list[int] = []
    rows: list[int] = []
    for job, chunk in zip(plan.reading, plan.chunks, strict=True):
        fed += job.tokens[job.cached : job.cached + chunk]
        slots.append(_slot(job))
        starts.append(job.cached)
        counts.append(chunk)
        rows.append(0)
    for job, proposal in zip(plan.deciding, drafts.proposals(), strict=True):
        ahead = proposal if info.max_rewind != 0 else []
        fed += job.tokens[job.cached :]
        fed += ahead
        slots.append(_slot(job))
        starts.append(job.cached)
        counts.append(len(job.tokens) - job.cached + len(ahead))
        rows.append(len(ahead) + 1)
    return Spans(slots, starts, counts, rows, target.ops.integers(fed))


def _slot(job: Job) -> Slot:
    assert job.slot is not None, f"job {job.id} takes part in a pass without a slot"
    return job.slot
