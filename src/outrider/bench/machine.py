"""What numbers were measured with: the machine, and the versions of everything that took part."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("outrider", "numpy", "torch")


def machine() -> dict[str, Any]:
    """Processor, cores, memory and operating system, as far as they can be asked."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": _usable_cores(),
        "memory_bytes": _memory(),
        "gpu": _gpu(),
        "os": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


def versions(others: dict[str, str] | None = None) -> dict[str, str | None]:
    """Of Python, of our packages and of `others` that took part. `commit` is None outside of a checkout."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {**found, "commit": commit(), **(others or {})}


def commit() -> str | None:
    """The commit this source was checked out from, with a mark when files differ from it."""
    folder = Path(__file__).resolve().parent
    known = _output("git", "-C", str(folder), "ls-files", Path(__file__).name)
    if not known:  # an installed copy inside somebody else's checkout is not of that commit
        return None
    name = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{name}, changed" if name and changed else name


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _cpu() -> str:
    """The processor's name. Linux tells it in a file, where there is one to tell; others by a command."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        for key in ("model name", "Model", "Hardware"):
            if fields.get(key):
                return fields[key]
    if platform.system() == "Linux":
        for line in (_output("lscpu") or "").splitlines():
            if line.startswith("Model name:"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    """That this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count()


def _memory() -> int | None:
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _gpu() -> str | None:
    """The device that torch would take, if torch is here at all: a mock needs none."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name(0)) if torch is not None and torch.cuda.is_available() else None
