"""How many threads compute natively, where nobody says: as many as make a one-row pass fastest."""

from __future__ import annotations

import logging
import time

from outrider.backends.base import Backend, Spans
from outrider.native.binding import num_cores, use_threads

log = logging.getLogger("outrider")

PASSES = 3  # with each number of threads, of which the fastest counts
ENOUGH = 1.05  # a number is fast enough if the best one is faster by less than this


def choose_threads(target: Backend) -> int:
    """Set the number of threads for this model, and log it where it is not one for each core.

    Small models do not gain from many cores: threads that wait for each other hundreds of times a pass cost more than
    they compute.
    """
    cores = num_cores()
    counts = candidates(cores)
    if len(counts) == 1:
        return cores
    seconds = {}
    for count in counts:
        use_threads(count)
        seconds[count] = min(_one_row_s(target) for _ in range(PASSES + 1))
    chosen = fewest_fast(seconds)
    use_threads(chosen)
    if chosen < cores:
        log.warning(
            "%d of %d cores compute: a token takes %.1f ms with them and %.1f ms with all; --threads sets others",
            *(chosen, cores, 1e3 * seconds[chosen], 1e3 * seconds[cores]),
        )
    return chosen


def candidates(cores: int) -> list[int]:
    """Numbers of threads to try: all cores, three quarters, a half, a quarter, but no fewer than two."""
    return sorted({max(min(2, cores), cores * share // 4) for share in (4, 3, 2, 1)}, reverse=True)


def fewest_fast(seconds: dict[int, float]) -> int:
    """The smallest number of threads that is about as fast as the best."""
    best = min(seconds.values())
    return min(count for count, taken in seconds.items() if taken <= ENOUGH * best)


def _one_row_s(target: Backend) -> float:
    slot = target.open((), 1, "\0threads")
    assert slot is not None, "a model that was just loaded has room"
    try:
        started = time.perf_counter()
        target.score(Spans([slot], [0], [1], [1], target.ops.fed([0])))
        return time.perf_counter() - started
    finally:
        target.close(slot)
