"""Builds the native library while outrider is installed. Without a compiler the package is installed without it."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("src", "outrider", "native")
PACKAGE = "outrider/native"


class NativeBuildHook(BuildHookInterface):
    """In place for an editable installation; else into the wheel, which is then one of this platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sources = Path(self.root, SOURCES)
        builder = _builder(sources / "build.py")
        editable = version == "editable"
        self._scratch = tempfile.TemporaryDirectory()
        folder = sources if editable else Path(self._scratch.name)
        if os.environ.get("OUTRIDER_NATIVE") == "0":
            if not (folder / builder.NAME).exists():
                (folder / builder.REASON).write_text("OUTRIDER_NATIVE=0 was set when outrider was installed\n")
        else:
            try:
                builder.build_into(folder, sources)
            except builder.BuildError as error:
                self.app.display_warning(f"outrider's native library was not built: {error}")
        if not editable:
            self._include(build_data, folder, builder)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._scratch.cleanup()

    def _include(self, build_data: dict[str, Any], folder: Path, builder: ModuleType) -> None:
        for name in (builder.NAME, builder.REASON):
            if (folder / name).exists():
                build_data["force_include"][str(folder / name)] = f"{PACKAGE}/{name}"
        if (folder / builder.NAME).exists():
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"


def _builder(path: Path) -> ModuleType:
    """outrider.native.build without outrider, which is not installed yet."""
    spec = importlib.util.spec_from_file_location("outrider_native_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _platform() -> str:
    """The tag of this machine. A Python for two kinds of Mac still has a compiler for one."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return name.replace("-", "_").replace(".", "_")
