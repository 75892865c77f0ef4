"""A peer in a process of its own: it loads a model, then answers one question at a time and waits.

The other end is `peers.PeerProcess`. Both speak JSON, one object a line, over standard input and output. First comes
`{"path", "assistant", "threads", "context"}`, answered by `{"version", "methods", "notes"}`; then tasks,
`{"method", "width", "prompt", "max_tokens", "temperature", "seed"}`, each answered by `{"tokens", "seconds",
"first_s", "rounds", "drafted", "accepted"}`. `{"error"}` may come instead of any answer.

Rules that are the same for all: the end-of-text token does not end an answer (it is neither banned nor obeyed), a
round is a pass of the target, and time runs from the call of the library to its last token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

# What llama-cpp-python advises for CPUs, and the usual value of it and of transformers.
LOOKUP_WIDTHS = (2, 10)
Told = dict[str, Any]


class Peer(Protocol):
    """Another library with a model loaded."""

    def about(self) -> Told:
        """Its version, its methods as [name, width] and what it cannot do, in sentences."""

    def answer(self, task: Mapping[str, Any]) -> Told: ...


def serve(load: Callable[[Mapping[str, Any]], Peer]) -> None:
    """Answer until the other end closes. What libraries print goes to standard error: it must not meet an answer."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    questions = _questions(sys.stdin)
    peer: Peer | None = None
    for question in questions:
        try:
            if peer is None:
                peer = load(question)
                told = peer.about()
            else:
                told = peer.answer(question)
        except Exception as error:
            told = {"error": _sentence(error)}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


def _questions(stream: TextIO) -> Iterator[Mapping[str, Any]]:
    while line := stream.readline():  # iterating over the file would read ahead
        yield json.loads(line)


def _sentence(error: Exception) -> str:
    """The first line of what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


class Rounds:
    """Counts passes of the target and the rows they were fed. A pass has one row that is no draft."""

    def __init__(self) -> None:
        self.passes = self.rows = 0

    def add(self, rows: int) -> None:
        self.passes += 1
        self.rows += rows

    def report(self, num_prompt: int, num_tokens: int) -> Told:
        drafted = self.rows - num_prompt - (self.passes - 1)
        return {"rounds": self.passes, "drafted": drafted, "accepted": min(drafted, num_tokens - self.passes)}


class TransformersPeer:
    """Plain decoding, prompt lookup and, where a draft model was named, assisted generation; float32 on the CPU."""

    def __init__(self, wish: Mapping[str, Any]) -> None:
        import torch

        torch.set_num_threads(wish["threads"])
        self.model = self._load(wish["path"])
        self.notes: list[str] = []
        self.assistant = None if wish["assistant"] is None else self._assistant(wish["assistant"])
        self.model.generation_config.eos_token_id = None
        self.rounds = Rounds()
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _load(self, path: str) -> Any:
        import torch
        import transformers

        place = Path(path)
        folder, options = (place.parent, {"gguf_file": place.name}) if place.is_file() else (place, {})
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        config: Any = transformers.GenerationConfig
        model = load(folder, local_files_only=True, dtype=torch.float32, **options).eval()
        # A model's own habits (sampling, penalties) would make the answers differ from those of others.
        model.generation_config = config(pad_token_id=0)
        return model

    def _assistant(self, path: str) -> Any:
        try:
            assistant = self._load(path)
        except Exception as error:
            self.notes.append(f"cannot load the draft model as an assistant: {_sentence(error)}")
            return None
        ours, theirs = (model.config.get_text_config().vocab_size for model in (self.model, assistant))
        if ours != theirs:
            self.notes.append(f"takes no assistant with another vocabulary ({theirs} tokens instead of {ours})")
            return None
        return assistant

    def _count(self, _module: object, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else positional[0]
        self.rounds.add(ids.shape[1])

    def about(self) -> Told:
        import transformers

        methods: list[list[Any]] = [["plain", 0], *(["prompt lookup", width] for width in LOOKUP_WIDTHS)]
        if self.assistant is not None:
            methods.append(["assistant", "auto"])
        return {"version": transformers.__version__, "methods": methods, "notes": self.notes}

    def answer(self, task: Mapping[str, Any]) -> Told:
        import torch

        prompt, temperature = torch.tensor([task["prompt"]]), task["temperature"]
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(task["seed"])
        if task["method"] == "prompt lookup":
            options["prompt_lookup_num_tokens"] = task["width"]
        elif task["method"] == "assistant":
            options["assistant_model"] = self.assistant
        watch = _Watch()
        self.rounds = Rounds()
        started = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=task["max_tokens"],
                streamer=watch,
                **options,
            )
        seconds = time.perf_counter() - started
        tokens = output[0, prompt.shape[1] :].tolist()
        first = watch.moments[1] - started  # the first that a streamer gets is the prompt
        counts = self.rounds.report(prompt.shape[1], len(tokens))
        return {"tokens": tokens, "seconds": seconds, "first_s": first, **counts}


class _Watch:
    """A streamer that only looks at the clock."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, _: object) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


class LlamaCppPeer:
    """Plain decoding and prompt lookup of llama-cpp-python. The weights stay as the file has them, quantized or not."""

    def __init__(self, wish: Mapping[str, Any]) -> None:
        library = import_module("llama_cpp")
        threads, context = wish["threads"], wish["context"]
        options: Told = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self.lookup = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding()
        # Drafts need the rows of all positions, which plain decoding would only be slowed down by.
        self.plain = library.Llama(wish["path"], **options)
        self.drafting = library.Llama(wish["path"], draft_model=self.lookup, logits_all=True, **options)
        self.rounds = Rounds()
        for model in (self.plain, self.drafting):
            model.eval = self._counted(model.eval)

    def _counted(self, evaluate: Callable[[list[int]], None]) -> Callable[[list[int]], None]:
        def counted(tokens: list[int]) -> None:
            self.rounds.add(len(tokens))
            evaluate(tokens)

        return counted

    def about(self) -> Told:
        methods = [["plain", 0], *(["prompt lookup", width] for width in LOOKUP_WIDTHS)]
        return {"version": import_module("llama_cpp").__version__, "methods": methods, "notes": []}

    def answer(self, task: Mapping[str, Any]) -> Told:
        model, prompt, most = self.plain, list(task["prompt"]), task["max_tokens"]
        if task["method"] == "prompt lookup":
            model, self.lookup.num_pred_tokens = self.drafting, task["width"]
        model.reset()  # nothing of an earlier answer is used again
        model.set_seed(task["seed"])
        self.rounds = Rounds()
        tokens: list[int] = []
        started = time.perf_counter()
        written = model.generate(prompt, temp=task["temperature"], top_k=0, top_p=1.0, min_p=0.0)
        first = 0.0
        for token in written:
            tokens.append(int(token))
            first = first or time.perf_counter() - started
            if len(tokens) == most:
                break
        seconds = time.perf_counter() - started
        written.close()
        return {"tokens": tokens, "seconds": seconds, "first_s": first, **self.rounds.report(len(prompt), len(tokens))}


PEERS: dict[str, Callable[[Mapping[str, Any]], Peer]] = {"transformers": TransformersPeer, "llama-cpp": LlamaCppPeer}

if __name__ == "__main__":
    serve(PEERS[sys.argv[1]])
