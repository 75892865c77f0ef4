"""How much memory there is to fill."""

from __future__ import annotations

import os
from pathlib import Path


def free_host_memory() -> int:
    """Bytes that nobody uses."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError):  # Windows; a cautious guess, `cache_tokens` sets another
        return 4 << 30
