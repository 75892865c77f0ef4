"""Outrider: speculative decoding that keeps exactly what the target model would have said itself.

engine = outrider.Engine.load("smollm2")
print(engine.generate("Once upon a time", max_tokens=40).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.backends.mock import MockBackend as MockBackend
    from outrider.config import MockConfig as MockConfig
    from outrider.draft.lookup import ScriptedDrafter as ScriptedDrafter
    from outrider.engine.engine import Engine as Engine
    from outrider.errors import OutriderError as OutriderError
    from outrider.types import Constraint as Constraint
    from outrider.types import Event as Event
    from outrider.types import FinishReason as FinishReason
    from outrider.types import Request as Request
    from outrider.types import Result as Result
    from outrider.types import SamplingParams as SamplingParams

__version__ = "0.1.0"

# Loaded on first use, so that `import outrider` and `outrider --help` stay quick.
_HOMES = {
    "Constraint": "outrider.types",
    "Engine": "outrider.engine.engine",
    "Event": "outrider.types",
    "FinishReason": "outrider.types",
    "MockBackend": "outrider.backends.mock",
    "MockConfig": "outrider.config",
    "OutriderError": "outrider.errors",
    "Request": "outrider.types",
    "Result": "outrider.types",
    "SamplingParams": "outrider.types",
    "ScriptedDrafter": "outrider.draft.lookup",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
