"""The command `serve`: load a model, listen, and say where."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from outrider.cli.answer import load
from outrider.config import SchedulerConfig
from outrider.errors import ConfigError, MissingPackageError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
LOCAL = ("127.0.0.1", "localhost", "::1")


def serve_model(
    loading: Mapping[str, Any],
    scheduling: SchedulerConfig,
    *,
    name: str,
    place: Mapping[str, Any],
    limits: Mapping[str, Any],
    api_keys: tuple[str, ...],
    quiet: bool,
) -> None:
    """Listen until a signal comes."""
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise MissingPackageError(f"the server needs {package}; install it with pip install 'outrider[serve]'")
    from outrider.server.run import Place, serve
    from outrider.server.settings import ServerSettings

    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = ServerSettings(model_name=name, api_keys=api_keys, **limits)
    where = Place(**place)
    if not api_keys and where.host not in LOCAL:
        typer.secho(f"anybody who reaches {where.host} may ask: --api-key closes it", fg="yellow", err=True)
    engine = load({**loading, "scheduling": scheduling}, threaded=True)

    def announce(url: str) -> None:
        drafts = "" if engine.method == "none" else f", drafts by {engine.method}"
        typer.echo(f"{name} answers at {url} (the page: {url}/, the API: {url}/v1){drafts}. Ctrl-C stops.")

    raise typer.Exit(serve(engine, settings, where, announce))


def keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """API keys from the command line, a file with one per line, and $OUTRIDER_API_KEYS (commas between)."""
    found = [*(given or []), *os.environ.get("OUTRIDER_API_KEYS", "").split(",")]
    if file is not None:
        try:
            found += file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}", param="api_key_file") from None
    return tuple(dict.fromkeys(key.strip() for key in found if key.strip()))


def hosts(host: str, allowed: list[str]) -> tuple[str, ...]:
    """The names a server may be called by. One on this machine alone has names: a page elsewhere could otherwise have
    a name of its own point here, and read what it should not."""
    return (*LOCAL, *(name.lower() for name in allowed)) if host in LOCAL or allowed else ()


def size(given: str | None, option: str) -> int | None:
    """Bytes of "4GiB", "500MB" or a plain number."""
    if given is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", given.lower())
    if match is None:
        raise typer.BadParameter(f"takes a size such as 4GiB or 500MB, got {given!r}", param_hint=option)
    return int(float(match[1]) * UNITS[match[2] or ""])


def model_name(model: str) -> str:
    """What clients call the model: a short name as it is, of a path its last part."""
    return Path(model).name.removesuffix(".gguf") if "/" in model or model.endswith(".gguf") else model
