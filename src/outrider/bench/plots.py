"""Pictures that explain themselves, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.bench.kernels import Point
from outrider.errors import ConfigError, MissingPackageError


def plot_curve(points: Sequence[Point], model: str, path: Path) -> None:
    """Cost of a pass by its rows, with what memory and arithmetic allow, and where a width breaks even."""
    plt = library()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for context in dict.fromkeys(point.context for point in points):
        some = [point for point in points if point.context == context]
        rows = [point.rows for point in some]
        axes.plot(rows, [point.ms for point in some], marker="o", label=f"measured, behind {context} tokens")
        axes.fill_between(rows, [point.low for point in some], [point.high for point in some], alpha=0.2)
    first = [point for point in points if point.context == points[0].context]
    rows, one = [point.rows for point in first], first[0].ms
    if first[0].limit_ms is not None:
        axes.plot(rows, [point.limit_ms for point in first], "--", color="gray", label="limit of memory and arithmetic")
    axes.plot(
        rows, [one * count for count in rows], ":", color="tab:red", label="one pass per token (drafts never pay above)"
    )
    axes.set(
        xlabel="rows of a pass (drafts + 1)",
        ylabel="milliseconds",
        title=f"{model}: below the red line drafts can pay",
        xscale="log",
        yscale="log",
    )
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def library() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingPackageError("plots need matplotlib; install it with pip install 'outrider[bench]'") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot write {path}: {error}; choose another file, such as curve.svg", param="plot"
        ) from None
