"""CUDA graphs: what is launched again and again is recorded once. All of a model's graphs share memory and a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from outrider.backends.cuda import novelty

RECORDED = 3  # runs after which what comes in many shapes is a graph: most of them come once or twice
_recording = threading.Lock()


class Graphs:
    """Records graphs.

    The memory they share lives as long as some graph uses it. Were the last one dropped while one of its tensors is
    still held, the next recording would fail with an internal assertion of the allocator (`use_count > 0`) and leave it
    unusable; so a first graph is recorded here, and stays.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._first = self._record(lambda: torch.zeros(1, device=device))

    def record(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """What it launches as a graph. It has run at least once, so that nothing is built while recording."""
        try:
            graph = self._record(compute)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()  # memory that is kept for later is not given back while a graph is recorded
            graph = self._record(compute)
        novelty.note()
        return graph

    def _record(self, compute: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # A draft that runs ahead has a thread of its own, and only one graph can be recorded at a time. Each model
        # records on its own stream: what libraries keep for a stream, graphs that run side by side must not share.
        # (`torch.cuda.graph` would first give back all memory that is kept for later, and the next rounds would pay.)
        with _recording, torch.cuda.stream(self._stream):
            torch.cuda.synchronize()
            graph.capture_begin(self._memory, capture_error_mode="thread_local")
            try:
                compute()
            finally:
                graph.capture_end()
        return graph
