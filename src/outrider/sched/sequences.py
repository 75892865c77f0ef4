"""The sequences of running jobs in the target's cache: opened, grown, preempted and closed here.

Every call of the backend is wrapped: a failure is a typed error of the job that the call was for.
"""

from __future__ import annotations

import logging

from outrider.backends.base import Backend, State
from outrider.errors import BackendError, PolicyError, wrap_errors
from outrider.sched.policies import Policy
from outrider.spec.round import slot_of
from outrider.spec.router import Router
from outrider.types import Job, Slot

log = logging.getLogger("outrider")

MAX_CLOSE_TRIES = 16  # steps in which closing a sequence is tried again before its pages are given up for lost


class Sequences:
    """`swap_tokens` may wait in host memory; 0 recomputes what was preempted."""

    def __init__(self, target: Backend, router: Router, swap_tokens: int) -> None:
        self._target = target
        self._router = router
        self._swap_tokens = swap_tokens
        self._swapped: dict[int, tuple[State, int]] = {}  # job id -> its state, and the tokens of it
        self._unclosed: list[tuple[Slot, int]] = []  # slots whose close failed, and how often

    @property
    def num_swapped(self) -> int:
        """Tokens in host memory."""
        return sum([tokens for _, tokens in self._swapped.values()])

    def open(self, job: Job, policy: Policy) -> bool:
        """A slot for a job that is admitted, with the tokens that are known of it. False: there is no room."""
        target, tenant, limit = self._target, job.request.tenant, job.limit
        if target.info.pages:
            limit = _checked_reserve(policy, job)
        with wrap_errors(BackendError, "the target failed to open a sequence"):
            state = job.saved or self._swapped.get(job.id, (None,))[0]
            if job.prompt_logprobs is not None and None in job.prompt_logprobs[1:]:
                # Only tokens that are fed have rows, so a prompt that is to be scored starts from nothing.
                self.forget(job)
                job.slot = target.open((), limit, tenant)
            elif state is None:
                job.slot = target.open(job.tokens, limit, tenant)
            elif target.info.pages:
                job.slot = target.swap_in(state, job.tokens, limit, tenant)
            else:
                job.slot = target.load(state)
            if job.slot is None:
                return False
            job.cached = target.length(job.slot)  # more than 0 where a prefix was known already
        job.saved = None
        self.forget(job)
        return True

    def reserve(self, job: Job, length: int) -> bool:
        """Whether the job has room for `length` tokens; it is taken at once."""
        with wrap_errors(BackendError, "the target failed to reserve pages"):
            return bool(self._target.reserve(slot_of(job), length))

    def trim(self, job: Job) -> bool:
        """Give back pages that were reserved for drafts and are not used. Whether there were any."""
        with wrap_errors(BackendError, "the target failed to trim a sequence"):
            return bool(self._target.trim(slot_of(job)))

    def frees_pages(self, job: Job) -> bool:
        with wrap_errors(BackendError, "the target failed to count pages"):
            return self._target.would_free(slot_of(job)) > 0

    def preempt(self, job: Job) -> str:
        """Free the job's pages; its tokens stay. Returns how they come back: "swap" or "recompute"."""
        slot, kind = slot_of(job), "recompute"
        with wrap_errors(BackendError, "the target failed to preempt a sequence"):
            self._target.publish(slot, job.tokens[: job.cached])  # pages that stay idle are found again
            if self._swap_tokens and self.num_swapped + job.cached <= self._swap_tokens:
                kind = "swap"
                self._swapped[job.id] = (self._target.swap_out(slot), job.cached)
        self._router.pause(job)  # a draft on the same pages gives them up first
        self._close_slot(job)
        return kind

    def close(self, job: Job) -> None:
        """Give back everything that drafters and target hold of the job."""
        self._router.forget(job)  # a draft on the same pages gives them up first
        self._close_slot(job)

    def _close_slot(self, job: Job) -> None:
        """Where the backend fails to close it, later steps try again."""
        slot, job.slot, job.cached = job.slot, None, 0
        if slot is not None:
            self._close(slot, 1)

    def forget(self, job: Job) -> None:
        """Nothing is kept in host memory for the job any more."""
        self._swapped.pop(job.id, None)

    def close_again(self) -> None:
        """Try once more to close what could not be closed."""
        unclosed, self._unclosed = self._unclosed, []
        for slot, tries in unclosed:
            self._close(slot, tries + 1)

    def _close(self, slot: Slot, tries: int) -> None:
        try:
            self._target.close(slot)
        except Exception:
            if tries == 1:
                log.exception("the target failed to close slot %s; it is tried again", slot)
            if tries < MAX_CLOSE_TRIES:
                self._unclosed.append((slot, tries))
            else:
                log.error("slot %s could not be closed in %d tries: its memory is lost", slot, tries)


def _checked_reserve(policy: Policy, job: Job) -> int:
    try:
        length = policy.reserve(job)
    except Exception as error:
        raise PolicyError(f"the policy {policy.name} failed on {job}: {type(error).__name__}: {error}") from error
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise PolicyError(f"the policy {policy.name} reserves {length!r} tokens for {job}; return a whole number")
    return length
