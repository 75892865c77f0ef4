"""What the HTTP side of a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits, keys and names. `hosts` are the names a browser may know this server by; none is any.

    A server on this machine alone should name its hosts: otherwise a page elsewhere can point its own name here.
    `share_memory` lets clients without keys share what is remembered across requests (`memory.py`).
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body: int = 4 << 20
    max_output: int | None = None
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    keep_s: float = 600.0
    share_memory: bool = False
