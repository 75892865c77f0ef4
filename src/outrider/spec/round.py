"""The verbs of a round: draft, score, judge, and what follows from the verdict. Faults of a plug-in become typed errors
here and nowhere else. The loop puts them in order.
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
    except DraftError as error:
        failed = _no_drafts(target, plan)
        failed.faults = {index: error.copy() for index, width in enumerate(plan.widths) if width}
        return failed
    drafts = target.ops.adopt(drafts)
    _check_tokens(drafter, target, drafts)
    return drafts


def _no_drafts(target: Backend, plan: Plan) -> Drafts:
    return Drafts([0] * len(plan.deciding), target.ops.integers([]))


def score(target: Backend, plan: Plan, drafts: Drafts) -> Scores:
    """ONE target pass for prompt chunks, pending tokens and drafts alike."""
    spans = _spans(target, plan, drafts)
    with _blaming(BackendError, "the target failed while scoring"):
        scores = target.score(spans)
    scores.counts = [rows for rows in spans.rows if rows]
    scores.num_fed = sum(spans.counts)
    info = target.info
    expected = (sum(spans.rows), info.num_columns)
    if tuple(scores.logits.shape) != expected:
        raise BackendError(
            f"the target returned rows of shape {tuple(scores.logits.shape)}, wanted {expected}", param="logits"
        )
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
    tokens, accepted, out, start = drafts.tokens.tolist(), verdicts.accepted.tolist(), [], 0
    for drafted, rows, kept, token in zip(drafts.counts, scores.counts, accepted, following, strict=True):
        out.append([*tokens[start : start + kept], token][:rows])
        start += drafted
    return out


def keep(target: Backend, jobs: Sequence[Job]) -> None:
    """The target's cache goes back to what was emitted: everything but the last token, which is fed next."""
    with _blaming(BackendError, "the target failed while rewinding"):
        target.keep([_slot(job) for job in jobs], [job.cached for job in jobs])


def observe(drafter: Drafter, plan: Plan, scores: Scores, verdicts: Verdicts) -> int:
    """The drafter sees what came of its proposals. Returns the passes that took."""
    with _blaming(DraftError, f"the {drafter.name} draft failed"):
        return drafter.observe(plan, scores, verdicts)


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
            raise self._error(f"{self._what}: {type(cause).__name__}: {cause}") from cause


def _check_shapes(drafter: Drafter, info: ModelInfo, plan: Plan, drafts: Drafts) -> None:
    """Drafts come from plug-ins too: shapes must fit what was asked for."""
    if len(drafts.counts) != len(plan.widths) or any(
        count > width for count, width in zip(drafts.counts, plan.widths, strict=True)
    ):
        raise DraftError(f"the {drafter.name} draft proposed {drafts.counts} tokens where {plan.widths} were allowed")
    total, name = sum(drafts.counts), drafter.name
    if tuple(drafts.tokens.shape) != (total,):
        raise DraftError(f"the {name} draft gave tokens of shape {tuple(drafts.tokens.shape)} for {total} drafts")
    wanted = (total, info.vocab_size)
    if drafts.probs is not None and tuple(drafts.probs.shape) != wanted:
        raise DraftError(
            f"the {name} draft gave rows of shape {tuple(drafts.probs.shape)}, wanted {wanted}", param="probs"
        )


def _check_tokens(drafter: Drafter, target: Backend, drafts: Drafts) -> None:
    """A job whose proposal is not made of tokens fails alone; zeros stand in until it is dropped."""
    size, tokens = target.info.vocab_size, drafts.tokens.tolist()
    if not tokens or (min(tokens) >= 0 and max(tokens) < size):
        return
    start = 0
    for index, count in enumerate(drafts.counts):
        wrong = [token for token in tokens[start : start + count] if not 0 <= token < size]
        if wrong:
            drafts.faults[index] = DraftError(
                f"the {drafter.name} draft proposed token {wrong[0]}; ids run from 0 to {size - 1}", param="draft"
            )
        start += count
    drafts.tokens = target.ops.integers([token if 0 <= token < size else 0 for token in tokens])


def _spans(target: Backend, plan: Plan, drafts: Drafts) -> Spans:
    """What the target is fed. A target that cannot rewind is not fed the draft: its last known row judges it."""
    info = target.info
    proposals = _proposals(drafts)
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
    for job, proposal in zip(plan.deciding, proposals, strict=True):
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


def _proposals(drafts: Drafts) -> Sequence[list[int]]:
    """The drafted tokens per job."""
    if not any(drafts.counts):
        return [[]] * len(drafts.counts)
    tokens, out, start = drafts.tokens.tolist(), [], 0
    for count in drafts.counts:
        out.append(tokens[start : start + count])
        start += count
    return out
