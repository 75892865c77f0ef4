"""Compiling the library with the machine's own compiler. `python -m outrider.native.build` builds it in place.

Nothing of outrider is imported here: the hook of the installation runs this file before there is a package.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NAME = "_native.so"  # on every system: it is loaded by its path
REASON = "_native.txt"  # stands in its place when it could not be built, and says why
COMPILERS = ("c++", "g++", "clang++")
# No contraction: the bits of a row must not depend on what the compiler fuses.
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread"),
    *("-Wall", "-Wextra"),
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512BW = ("-Wno-maybe-uninitialized", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2)
AVX512 = (*AVX512BW, "-mavx512vnni")
PORTABLE = "portable"  # the instruction set that every machine has: without it there is no library


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A file isa_<name>.cpp that only some machines can compile, and fewer can run."""

    machines: tuple[str, ...]  # how the names of compilers' targets begin
    flags: tuple[str, ...]


INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    "neon": InstructionSet(("aarch64", "arm64"), ("-march=armv8.2-a+dotprod",)),
    "i8mm": InstructionSet(("aarch64", "arm64"), ("-march=armv8.2-a+dotprod+i8mm",)),
    "avx2": InstructionSet(("x86_64", "amd64"), AVX2),
    "avx512bw": InstructionSet(("x86_64", "amd64"), AVX512BW),
    "avx512": InstructionSet(("x86_64", "amd64"), AVX512),
}


class BuildError(Exception):
    """The library cannot be built. The message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Built:
    """A library that was built: for which instruction sets, and why others were left out."""

    path: Path
    instruction_sets: tuple[str, ...]
    left_out: Mapping[str, str]


def build(folder: Path, out: Path, extra_flags: Sequence[str] = ()) -> Built:
    """Compile the sources in `folder` to the shared library `out`, which is replaced in one step."""
    started = time.time_ns()
    sources = sorted(folder.glob("*.cpp"))
    if not sources:
        raise BuildError(f"there are no C++ sources in {folder}")
    compiler = _Compiler(find_compiler(), (*FLAGS, *extra_flags))
    special = {source: source.stem.removeprefix("isa_") for source in sources if source.stem.startswith("isa_")}
    special = {source: name for source, name in special.items() if name != PORTABLE}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        attempts = {name: pool.submit(compiler.try_compile, name, one, Path(scratch)) for one, name in special.items()}
        reasons = {name: attempt.result() for name, attempt in attempts.items()}
        usable = tuple(name for name, reason in reasons.items() if reason is None)
        macros = tuple(f"-DOUTRIDER_HAS_{name.upper()}=1" for name in (*usable, PORTABLE))
        base = [source for source in sources if source not in special]
        for done in [pool.submit(compiler.compile, source, Path(scratch), macros) for source in base]:
            done.result()
        chosen = [*base, *(source for source, name in special.items() if name in usable)]
        compiler.link([_object(source, Path(scratch)) for source in chosen], out, started)
    return Built(out, (*usable, PORTABLE), {name: reason for name, reason in reasons.items() if reason is not None})


def build_into(folder: Path, sources: Path, extra_flags: Sequence[str] = ()) -> Built:
    """Build the library into `folder` under its usual name, or leave there why it could not be built."""
    reason = folder / REASON
    try:
        built = build(sources, folder / NAME, extra_flags)
    except BuildError as error:
        reason.write_text(f"{error}\n", encoding="utf-8")
        raise
    reason.unlink(missing_ok=True)
    return built


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, or the first of the usual names."""
    chosen = os.environ.get("CXX", "").strip()
    candidates = [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]
    for command in candidates:
        if shutil.which(command[0]) is not None:
            return command
    asked = f"CXX names {chosen}, which is not there" if chosen else f"there is none of {', '.join(COMPILERS)}"
    raise BuildError(f"no C++ compiler was found ({asked})")


class _Compiler:
    def __init__(self, command: Sequence[str], flags: Sequence[str]) -> None:
        self.command = list(command)
        self.flags = list(flags)
        self.machine = self._run(["-dumpmachine"], "asking the compiler for its machine").strip().lower()

    def try_compile(self, name: str, source: Path, scratch: Path) -> str | None:
        """Compile the file of an instruction set; why not, if that fails."""
        wanted = INSTRUCTION_SETS.get(name)
        if wanted is None:
            return f"nobody knows the flags of {source.name}"
        if not self.machine.startswith(wanted.machines):
            return f"not for {self.machine}"
        try:
            self.compile(source, scratch, wanted.flags)
        except BuildError as error:
            return str(error)
        return None

    def compile(self, source: Path, scratch: Path, flags: Sequence[str]) -> None:
        arguments = [*self.flags, *flags, "-c", str(source), "-o", str(_object(source, scratch))]
        self._run(arguments, f"compiling {source.name}")

    def link(self, objects: Sequence[Path], out: Path, started: int) -> None:
        """Beside its place first, then moved there: nobody ever loads half a library.

        It is as old as the sources that were read: one that changed in between counts as newer.
        """
        half = out.with_name(f"{out.name}.{os.getpid()}.part")
        try:
            self._run([*self.flags, "-shared", *map(str, objects), "-o", str(half)], "linking")
            os.utime(half, ns=(started, started))
            half.replace(out)
        except OSError as error:
            raise BuildError(f"{out} cannot be written: {error}") from error
        finally:
            half.unlink(missing_ok=True)

    def _run(self, arguments: Sequence[str], what: str) -> str:
        try:
            done = subprocess.run([*self.command, *arguments], capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise BuildError(f"{what} failed: {self.command[0]} does not run: {error}") from error
        if done.returncode:
            raise BuildError(f"{what} failed: {_first_error(done.stderr) or f'exit code {done.returncode}'}")
        return done.stdout


def _object(source: Path, scratch: Path) -> Path:
    return scratch / f"{source.stem}.o"


def _first_error(told: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")[:300]


def main(flags: Sequence[str]) -> int:
    """Build in place, with more flags if some are given."""
    folder = Path(__file__).parent
    try:
        built = build_into(folder, folder, flags)
    except BuildError as error:
        sys.stderr.write(f"outrider: the native library was not built: {error}\n")
        return 1
    sys.stdout.write(f"{built.path}: {', '.join(built.instruction_sets)}\n")
    for name, reason in built.left_out.items():
        sys.stdout.write(f"left out {name}: {reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
