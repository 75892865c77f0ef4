"""Who goes first, who gives way, how much room is kept: a policy answers these three questions and nothing else.

A new one is a class like those below; pass an object of it as `policy=`. While a job waits its order is not asked for
again, so it must not depend on the time: ageing, for example, is an order by arrival with a head start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.errors import ConfigError, PolicyError
from outrider.types import Job

Order = tuple[float, ...]
HEADROOM = 64  # tokens beyond what a job has now: it should not have to give way at once
PROMPT_TOKEN = 1.0 / 8.0  # of the work that a token of the answer takes
AGEING_S = 30.0


class Policy:
    """First come, first served; the base of the others."""

    name = "fcfs"
    drops_late = False  # end a job whose deadline passes before another pass can end

    def order(self, job: Job) -> Order:
        """Lower goes first."""
        return (job.arrival,)

    def victim(self, candidates: Sequence[Job]) -> Job | None:
        """Who of the running gives its pages up; all of them hold some. None: nobody, drafts and newcomers must do."""
        return max(candidates, key=lambda job: (self.order(job), job.id))

    def reserve(self, job: Job) -> int:
        """Tokens there must be room for when a job is let in."""
        return min(job.limit, len(job.tokens) + HEADROOM)


class ShortestFirst(Policy):
    """Shortest remaining job first: the lowest mean latency where lengths are known; long ones may wait for long."""

    name = "sjf"

    def order(self, job: Job) -> Order:
        work = job.limit - len(job.tokens) + PROMPT_TOKEN * (len(job.tokens) - job.cached)
        return (work, job.arrival)


class ByPriority(Policy):
    """High before normal before low. Waiting counts: every `ageing_s` seconds make up for a level."""

    name = "priority"
    levels = ("high", "normal", "low")

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        self.ageing_s = ageing_s

    def order(self, job: Job) -> Order:
        return (job.arrival + self.ageing_s * self.levels.index(job.request.priority),)


class EarliestDeadline(Policy):
    """Who must be done first goes first; who can no longer make it is ended instead of served."""

    name = "edf"
    drops_late = True

    def order(self, job: Job) -> Order:
        return (math.inf if job.deadline is None else job.deadline, job.arrival)


class Orca(Policy):
    """All pages a job can come to need are kept for it when it is let in: nobody ever gives way."""

    name = "orca"

    def victim(self, candidates: Sequence[Job]) -> Job | None:
        return None

    def reserve(self, job: Job) -> int:
        return job.limit


POLICIES = {kind.name: kind for kind in (Policy, ShortestFirst, ByPriority, EarliestDeadline, Orca)}


def checked_order(policy: Policy, job: Job) -> Order:
    """`policy.order(job)`, or a PolicyError. An order that cannot be compared would break the queue for every job."""
    try:
        order = policy.order(job)
    except Exception as error:
        raise PolicyError(f"the policy {policy.name} failed on {job}: {type(error).__name__}: {error}") from error
    if not isinstance(order, tuple) or not all(isinstance(part, (int, float)) and part == part for part in order):
        raise PolicyError(f"the policy {policy.name} gave {job} the order {order!r}; return a tuple of numbers")
    return order


def find_policy(policy: object) -> Policy:
    """By its name, or as it is."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    raise ConfigError(f"policy is one of {', '.join(POLICIES)} or a Policy, got {policy!r}", param="policy")
