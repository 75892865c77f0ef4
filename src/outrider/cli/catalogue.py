"""Which models there are, and what is in one."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from outrider.config import ModelConfig
from outrider.engine.loading import tokenizer_of
from outrider.engine.runner import choose, has_torch
from outrider.models.base import ModelFile, TransformerSpec
from outrider.models.cache import cache_folder
from outrider.models.names import DEFAULT, NAMES
from outrider.models.opening import open_model
from outrider.models.source import ModelSource
from outrider.native.binding import num_cores
from outrider.native.library import instructions


@dataclass(frozen=True, slots=True)
class Listed:
    name: str  # what to type
    source: str
    path: str | None  # None: not fetched yet
    num_bytes: int


def show_list(as_json: bool) -> None:
    """The command `models list`."""
    listed = [_listed(name, source) for name, source in NAMES.items()]
    listed += [_listed(source, source) for source in _cached_sources() if source not in NAMES.values()]
    if as_json:
        for model in listed:
            typer.echo(json.dumps(asdict(model)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "source", "here", box=None, pad_edge=False)
    for model in listed:
        name = f"{model.name} (default)" if model.name == DEFAULT else model.name
        table.add_row(name, model.source, "-" if model.path is None else _size(model.num_bytes))
    console = Console()
    console.print(table)
    console.print(f"kept in {cache_folder()}", style="dim", highlight=False, soft_wrap=True)


def show_methods(as_json: bool) -> None:
    """The command `methods`."""
    from outrider.engine.methods import METHODS

    if as_json:
        for name, method in METHODS.items():
            typer.echo(json.dumps({"name": name, **method._asdict()}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("--draft", "what it does", "what it needs", box=None, pad_edge=False)
    for method in METHODS.values():
        table.add_row(method.written, method.line, method.needs)
    console = Console()
    console.print(table, markup=False)
    console.print("Several with commas are tried in turn: suffix,eagle:PATH", style="dim", highlight=False)


def _listed(name: str, source: str) -> Listed:
    path = ModelSource.parse(source).cached()
    return Listed(name, source, None if path is None else str(path), 0 if path is None else _num_bytes(path))


def _cached_sources() -> list[str]:
    """What is in the cache folder, as somebody would ask for it."""
    sources = [f"pypi:{folder.name}" for folder in (cache_folder() / "pypi").glob("[!.]*")]
    for folder in (cache_folder() / "hf").glob("models--*"):
        repository = f"hf:{folder.name.removeprefix('models--').replace('--', '/', 1)}"
        files = [file for snapshot in folder.glob("snapshots/*") for file in snapshot.rglob("*.gguf")]
        sources += [f"{repository}:{file.name}" for file in files] or [repository]
    return sorted(set(sources))


def show_model(model: str, tensors: bool, as_json: bool) -> None:
    """The command `models inspect`."""
    path = ModelSource.parse(model).fetch()
    file = open_model(path)
    tokenizer = tokenizer_of(path, file)
    spec = file.spec
    facts: dict[str, Any] = {
        "path": str(path),
        "family": spec.family,
        "parameters": sum(math.prod(shape) for shape in file.shapes.values()),
        "file_bytes": _num_bytes(path),
        "types": dict(Counter(file.types.values()).most_common()),
        **{name: value for name, value in asdict(spec).items() if name not in ("family", "rope", "windows")},
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
        "eos_ids": list(file.eos_ids),
        "chat_template": tokenizer is not None and tokenizer.has_chat,
        "backend": _backend(file),
    }
    if isinstance(spec, TransformerSpec):
        facts["window"] = next((window for window in spec.windows if window is not None), None)
        facts["cache_bytes_per_token_fp32"] = 8 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    if tensors:
        facts["tensors"] = {name: [file.types[name], *shape] for name, shape in file.shapes.items()}
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        if name == "tensors":
            for tensor, (kind, *shape) in value.items():
                typer.echo(f"  {tensor:<32}{kind:<9}{shape}")
        else:
            typer.echo(f"{name.replace('_', ' '):<28}{_readable(name, value)}")


def _backend(file: ModelFile) -> dict[str, Any]:
    """What would run the model here, and why not the native backend."""
    runner = choose(file, ModelConfig())
    if runner.backend == "native":
        return {
            "name": "native",
            "device": runner.device,
            "instructions": instructions(),
            "threads": num_cores(),
            "reason": None,
        }
    name = "torch" if has_torch() else None
    return {"name": name, "device": runner.device, "instructions": None, "threads": None, "reason": runner.reason}


def _readable_backend(backend: dict[str, Any]) -> str:
    if backend["name"] == "native":
        threads = "1 thread" if backend["threads"] == 1 else f"{backend['threads']} threads"
        return f"native ({backend['instructions']}, {threads})"
    name = backend["name"] or "none: torch is not installed"
    return f"{name} ({backend['reason']})"


def _readable(name: str, value: Any) -> str:
    if name == "backend":
        return _readable_backend(value)
    if name == "parameters":
        return f"{value:,}"
    if name.startswith(("file_bytes", "cache_bytes")):
        return _size(value)
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}" for kind, count in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _num_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _size(num_bytes: int) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes = num_bytes / 1000  # type: ignore[assignment]
    return f"{num_bytes:.3g} GB"
