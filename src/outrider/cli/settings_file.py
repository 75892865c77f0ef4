"""Settings in a TOML file: what `outrider tune` writes, and `generate`, `chat` and `serve` read with --config.

The file's keys are the names of options. What is given on the command line goes before what the file says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from outrider.errors import ConfigError

# option -> the types its value may have in a file
KEYS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "draft": (str,),
    "width": (int, str),
    "tree": (bool,),
    "run_ahead": (bool,),
    "backend": (str,),
    "device": (str,),
    "threads": (int,),
    "context": (int,),
    "strict": (bool,),
    "dtype": (str,),
    "kv_type": (str,),
}


def read(path: Path) -> dict[str, Any]:
    """The settings of a file; tables (such as what was measured) are for people."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}", param="config") from None
    settings = {key: value for key, value in content.items() if not isinstance(value, dict)}
    for key, value in settings.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(KEYS)}"
            raise ConfigError(f"{path}: {key} is not a setting; {hint}", param="config")
        if not isinstance(value, KEYS[key]) or (isinstance(value, bool) and bool not in KEYS[key]):
            kinds = " or ".join(kind.__name__ for kind in KEYS[key])
            raise ConfigError(f"{path}: {key} takes {kinds}, got {value!r}", param="config")
    if "width" in settings:
        settings["width"] = str(settings["width"])
    return settings


def merged(context: typer.Context, path: Path | None) -> dict[str, Any]:
    """The values of the options in `KEYS`: from the command line, else from the file, else their defaults."""
    given = {name: context.params[name] for name in KEYS if name in context.params}
    if path is None:
        return given
    for name, value in read(path).items():
        source = context.get_parameter_source(name)
        if name in given and (source is None or source.name != "COMMANDLINE"):
            given[name] = value
    return given


def write(path: Path, settings: Mapping[str, Any], comments: list[str], measured: Mapping[str, Any]) -> None:
    """A file that `read` reads."""
    lines = [*(f"# {comment}" for comment in comments), ""]
    lines += [f"{name} = {_toml(value)}" for name, value in settings.items()]
    lines += ["", "[measured]", *(f"{_key(name)} = {_toml(value)}" for name, value in measured.items())]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; choose another --out", param="out"
        ) from None


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _key(name: str) -> str:
    return _toml(name)
