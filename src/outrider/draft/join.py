"""Drafts that several made for different jobs, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.sampling.ops import SamplingOps
from outrider.types import Drafts


class Part(NamedTuple):
    """What was drafted for some jobs (by their index in the round)."""

    members: Sequence[int]
    drafts: Drafts


def join(ops: SamplingOps, num_jobs: int, parts: Sequence[Part]) -> Drafts:
    """The parts as one, job after job; jobs that are in none of them have no drafts."""
    useful = [part for part in parts if any(part.drafts.counts) or part.drafts.faults]
    if len(useful) <= 1 and parts and list((useful or parts)[0].members) == list(range(num_jobs)):
        whole = (useful or parts)[0].drafts  # as it is: who drafted it may go on with it
        for part in parts:
            if part.drafts is not whole:
                whole.steps += part.drafts.steps
                whole.fallbacks += part.drafts.fallbacks
        return whole
    whole = Drafts([0] * num_jobs, ops.nothing, makers=[""] * num_jobs)
    owners: list[tuple[int, int]] = []  # (job, token) in the order of the parts
    for members, drafts in parts:
        whole.steps += drafts.steps
        whole.fallbacks += drafts.fallbacks
        for place, (index, count) in enumerate(zip(members, drafts.counts, strict=True)):
            if place in drafts.faults:
                whole.faults[index] = drafts.faults[place]
            if count:
                whole.counts[index] = count
                if drafts.makers:
                    whole.makers[index] = drafts.makers[place]
                if place in drafts.parents:
                    whole.parents[index] = drafts.parents[place]
                if place in drafts.borrowed:
                    whole.borrowed.add(index)
                owners += [(index, token) for token in range(count)]
    if not owners:
        return whole
    whole.device.is_deferred = any(drafts.device.is_deferred for _, drafts in parts)
    whole.device.may_be_queued = any(drafts.device.may_be_queued for _, drafts in parts)
    # of several that were drawn one after another, the last one's end is where the target's pass begins
    whole.device.watch = next(
        (drafts.device.watch for _, drafts in reversed(parts) if drafts.device.watch is not None), None
    )
    order = ops.integers(sorted(range(len(owners)), key=owners.__getitem__))
    whole.tokens = ops.xp.concat([drafts.tokens for _, drafts in parts])[order]
    sampled = next((drafts.probs for _, drafts in parts if drafts.probs is not None), None)
    if sampled is not None:
        rows = [
            ops.one_hot(drafts.tokens, sampled.shape[1]) if drafts.probs is None else drafts.probs
            for _, drafts in parts
        ]
        whole.probs = ops.xp.concat(rows)[order, ...]
    return whole
