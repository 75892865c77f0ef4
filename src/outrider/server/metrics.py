"""/metrics: what the engine counts, speculation under the names operators know, and what HTTP adds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from outrider import __version__
from outrider.engine.engine import Engine
from outrider.metrics import Statistics
from outrider.server.figures import steady
from outrider.serving import BOUNDS, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PULSE_S = 0.1  # how often the event loop is asked how late it is
Labels = Mapping[str, str]


class HttpMetrics:
    """Requests by path and status, and how late the event loop is. Written and read on the event loop."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.delay = Histogram()

    def count(self, path: str, status: int) -> None:
        self.requests[path, status] = self.requests.get((path, status), 0) + 1

    async def measure_delay(self) -> None:
        """For ever: sleep a moment, and see how much longer it took."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PULSE_S
            await asyncio.sleep(PULSE_S)
            self.delay.add(max(loop.time() - due, 0.0))


def exposition(engine: Engine, http: HttpMetrics, model: str) -> str:
    """The whole page in Prometheus' text format."""
    requests = [({"path": path, "status": str(status)}, count) for (path, status), count in http.requests.items()]
    parts = [
        steady(lambda: engine.metrics.prometheus(now=engine.clock.now())).rstrip("\n"),
        *_speculation(engine.statistics),
        *_family("http_requests_total", "counter", "HTTP requests by path and status.", requests),
        *_delay(http.delay.copy()),
        *_family(
            "info",
            "gauge",
            "What is served.",
            [({"version": __version__, "model": model, "method": engine.method}, 1)],
        ),
    ]
    return "\n".join(parts) + "\n"


def _speculation(told: Statistics) -> list[str]:
    """Counted parts are read before their wholes: accepted never exceeds drafted, however the engine goes on."""
    by_accepted = dict(told.rounds_by_accepted)
    accepted, drafted, rounds = told.accepted, told.drafted, told.draft_rounds
    deepest = max(by_accepted, default=0)
    places = [
        ({"position": str(place)}, sum(times for kept, times in by_accepted.items() if kept > place))
        for place in range(deepest)
    ]
    name = "spec_decode_num_{}_total".format
    return [
        *_family(name("drafts"), "counter", "Rounds with a draft.", [({}, rounds)]),
        *_family(name("draft_tokens"), "counter", "Drafted tokens.", [({}, drafted)]),
        *_family(name("accepted_tokens"), "counter", "Drafted tokens that were kept.", [({}, accepted)]),
        *_family(name("accepted_tokens_per_pos"), "counter", "Kept tokens by their place in the draft.", places),
    ]


def _delay(histogram: Histogram) -> list[str]:
    bounds = BOUNDS["s"]
    counts = zip([f"{bound:g}" for bound in bounds], histogram.cumulative(bounds), strict=True)
    name = "outrider_event_loop_delay_seconds"
    return [
        *_family("event_loop_delay_seconds", "histogram", "How late the event loop was, every 100 ms.", []),
        *(f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in [*counts, ("+Inf", histogram.count)]),
        f"{name}_sum {histogram.total}",
        f"{name}_count {histogram.count}",
    ]


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> list[str]:
    return [
        f"# HELP outrider_{name} {text}",
        f"# TYPE outrider_{name} {kind}",
        *(f"outrider_{name}{_braces(labels)} {value}" for labels, value in samples),
    ]


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
