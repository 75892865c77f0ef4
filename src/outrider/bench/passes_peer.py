"""llama-cpp-python's passes in a process of its own: `passes` asks, this answers (`peer_process` says how they talk).

A task is `{"kind", "tokens", "rows"}` as in `passes.Task`, answered by `{"seconds"}`. Everything goes through the
functions of llama.h as the package offers them, since its own classes copy every row of logits they do not need.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np

from outrider.bench.peer_process import Told, serve

PASSES = 4  # of one task; one before them is not counted


def common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens are the same from the first on."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(some), len(others)))


class LlamaCppPasses:
    """A model and one sequence of it."""

    def __init__(self, wish: Mapping[str, Any]) -> None:
        self.library = import_module("llama_cpp")
        threads = wish["threads"]
        self.model = self.library.Llama(
            wish["path"],
            n_ctx=wish["context"],
            n_batch=wish["context"],
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self.context = self.model.ctx
        self.num_columns = self.model.n_vocab()
        self.batch = self.library.llama_batch_init(wish["context"], 0, 1)
        self.held: list[int] = []  # tokens in the cache

    def about(self) -> Told:
        return {"version": self.library.__version__, "methods": [], "notes": []}

    def answer(self, task: Mapping[str, Any]) -> Told:
        tokens, rows = list(task["tokens"]), int(task["rows"])
        work = {"pass": self._pass, "prefill": self._prefill, "decode": self._decode}[task["kind"]]
        return {"seconds": work(tokens, rows)}

    def _pass(self, tokens: Sequence[int], rows: int) -> float:
        context = len(tokens) - rows
        self._rewind(known := common(self.held, tokens[:context]))
        if known < context:
            self._feed(tokens[known:context], 1)
        return median([self._one_pass(tokens[context:], context, rows) for _ in range(PASSES + 1)][1:])

    def _prefill(self, tokens: Sequence[int], rows: int) -> float:
        return self._one_pass(tokens, 0, rows)

    def _one_pass(self, tokens: Sequence[int], context: int, rows: int) -> float:
        self._rewind(context)
        started = time.perf_counter()
        self._feed(tokens, rows)
        return time.perf_counter() - started

    def _decode(self, tokens: Sequence[int], rows: int) -> float:
        """Per token, after the first."""
        self._rewind(known := common(self.held, tokens[:-1]))
        token = int(np.argmax(self._feed(tokens[known:], 1)))
        started = time.perf_counter()
        for _ in range(rows):
            token = int(np.argmax(self._feed([token], 1)))
        return (time.perf_counter() - started) / rows

    def _feed(self, tokens: Sequence[int], rows: int) -> Any:
        """One pass; logits of the last `rows` tokens."""
        batch, count = self.batch, len(tokens)
        batch.n_tokens = count
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at] = token, len(self.held) + at
            batch.seq_id[at][0], batch.n_seq_id[at] = 0, 1
            batch.logits[at] = at >= count - rows
        if failed := self.library.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode of {count} tokens returned {failed}")
        self.held += tokens
        logits = self.library.llama_get_logits(self.context)  # waits until they are there
        return np.ctypeslib.as_array(logits, shape=(rows, self.num_columns))

    def _rewind(self, length: int) -> None:
        if hasattr(self.library, "llama_memory_seq_rm"):
            memory = self.library.llama_get_memory(self.context)
            self.library.llama_memory_seq_rm(memory, 0, length, -1)
        else:  # before 0.3.10
            self.library.llama_kv_cache_seq_rm(self.context, 0, length, -1)
        del self.held[length:]


if __name__ == "__main__":
    serve(LlamaCppPasses)
