"""The law, from its definition: an independent float64 implementation of R3, and the joint distribution by enumeration.

Written for reading, one token at a time, sharing no code with `outrider.sampling`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from outrider.backends.mock import MockBackend
from outrider.types import SamplingParams

SIGNIFICANCE = 1e-6


def distribution(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Probabilities of the next token after prompt + output."""
    x = [float(value) for value in logits]
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, times in Counter(output).items():
        x[token] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in params.banned:
        x[token] = -math.inf
    if params.temperature == 0:
        return np.array([float(token == x.index(max(x))) for token in range(len(x))])
    highest = max(x)
    mass = [math.exp((value - highest) / params.temperature) for value in x]
    p = normalised(mass)
    if params.top_k is not None:
        best = sorted(range(len(p)), key=lambda token: (-p[token], token))[: params.top_k]
        p = normalised([p[token] if token in best else 0.0 for token in range(len(p))])
    if params.top_p < 1:
        p = until(p, sorted(range(len(p)), key=lambda token: (-p[token], token)), params.top_p)
    if params.min_p > 0:
        p = normalised([value if value >= params.min_p * max(p) else 0.0 for value in p])
    if params.typical_p < 1:
        entropy = -sum(value * math.log(value) for value in p if value > 0)
        possible = [token for token in range(len(p)) if p[token] > 0]
        order = sorted(possible, key=lambda token: (abs(-math.log(p[token]) - entropy), token))
        p = until(p, order, params.typical_p)
    return np.array(p)


def normalised(mass: Sequence[float]) -> list[float]:
    total = sum(mass)
    return [value / total for value in mass]


def until(p: Sequence[float], order: Sequence[int], limit: float) -> list[float]:
    """Tokens in `order` until their mass reaches `limit`; the one that crosses stays."""
    kept, total = set(), 0.0
    for token in order:
        if total >= limit:
            break
        kept.add(token)
        total += p[token]
    return normalised([p[token] if token in kept else 0.0 for token in range(len(p))])


def joint_law(target: MockBackend, prompt: Sequence[int], params: SamplingParams, length: int) -> np.ndarray:
    """P(t1, ..., t_length | prompt) as an array with one axis per token."""
    size = target.info.vocab_size
    return enumerated_law(lambda output: target.logits_after([*prompt, *output])[:size], size, prompt, params, length)


def enumerated_law(
    logits_after: Callable[[tuple[int, ...]], Sequence[float]],
    size: int,
    prompt: Sequence[int],
    params: SamplingParams,
    length: int,
) -> np.ndarray:
    """The same for any model: `logits_after` tells its row after the prompt and an output."""
    law = np.zeros((size,) * length)

    def walk(output: tuple[int, ...], chance: float) -> None:
        if len(output) == length:
            law[output] = chance
            return
        for token, p in enumerate(distribution(logits_after(output), params, prompt, output)):
            if p > 0:
                walk((*output, token), chance * float(p))

    walk((), 1.0)
    return law


def p_value(outputs: Sequence[Sequence[int]], law: np.ndarray) -> float:
    """How likely such a deviation is if `outputs` follow `law`: the worse of chi-square and total variation.

    Impossible outputs give 0. Cells too small for chi-square are pooled. For total variation, one sample moves it by at
    most 1/n, so McDiarmid's inequality bounds its deviation from its mean under the law.
    """
    n = len(outputs)
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(np.asarray(outputs).T), 1)
    if counts[law == 0].any():
        return 0.0
    observed, expected = counts[law > 0], law[law > 0] * n
    small = expected < 10
    cells = [*zip(observed[~small], expected[~small], strict=True)]
    if small.any():
        cells.append((observed[small].sum(), expected[small].sum()))
    if len(cells) == 1:
        return 1.0
    chi_square = sum((o - e) ** 2 / e for o, e in cells)
    tail = chi_square_tail(chi_square, len(cells) - 1)
    variation = 0.5 * np.abs(counts / n - law).sum()
    typical = 0.5 * np.sqrt(law * (1 - law) / n).sum()  # E|X| <= sqrt(Var X)
    return min(tail, math.exp(-2 * n * max(0.0, variation - typical) ** 2))


def chi_square_tail(value: float, freedom: int) -> float:
    """How likely so much or more is. Machines with a GPU may have no scipy: there, the cube root of Wilson and
    Hilferty, which is off by a few per cent of what it says."""
    try:
        from scipy import stats
    except ImportError:
        spread = 2 / (9 * freedom)
        return 0.5 * math.erfc(((value / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))
    return float(stats.chi2.sf(value, freedom))


def law_p_value(outputs: Sequence[Sequence[int]], law: np.ndarray) -> float:
    """The first four tokens, and the last four: errors that need a few rounds to show are in the second."""
    length = law.ndim
    first = law.sum(axis=tuple(range(4, length)))
    last = law.sum(axis=tuple(range(length - 4)))
    return min(p_value([o[:4] for o in outputs], first), p_value([o[-4:] for o in outputs], last))
