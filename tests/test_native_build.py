"""The native library: compiled, packed, loaded, and told about where there is none. Which backend runs what."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.config import ModelConfig
from outrider.engine import runner
from outrider.engine.engine import Engine
from outrider.engine.runner import choose, device_name, may_have_cuda
from outrider.errors import ConfigError, MissingPackageError, NativeMissingError
from outrider.models.opening import open_model
from outrider.native import library as native
from outrider.native.build import NAME, REASON, BuildError, build, build_into, find_compiler

from tiny import save_folder, save_gguf, tiny

ROOT = Path(__file__).parent.parent
SOURCES = {
    "api.cpp": """
#define API extern "C" __attribute__((visibility("default")))
int portable_answer();
API int outrider_abi() { return ABI_NUMBER; }
API int outrider_answer() { return portable_answer(); }
API int outrider_threads() { return 2; }
API void outrider_set_threads(int) {}
static const char *selected = "portable";
API const char *outrider_isas() { return "fast,portable"; }
API const char *outrider_selected() { return selected; }
API int outrider_select(const char *name) { selected = name[0] == 'f' ? "fast" : "portable"; return 0; }
#ifdef OUTRIDER_HAS_NEON
API int outrider_has_neon() { return 1; }
#endif
#ifdef OUTRIDER_HAS_AVX2
API int outrider_has_avx2() { return 1; }
#endif
""".replace("ABI_NUMBER", str(native.ABI)),
    "isa_portable.cpp": "int portable_answer() { return 42; }",
    "isa_neon.cpp": "#if !defined(__ARM_FEATURE_DOTPROD)\n#error no dot product\n#endif",
    "isa_avx2.cpp": "#if !defined(__AVX2__)\n#error no AVX2\n#endif",
    "isa_avx512.cpp": "this is no C++",
}


def has_compiler() -> bool:
    try:
        find_compiler()
    except BuildError:
        return False
    return True


compiled = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "native"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
        os.utime(folder / name, (1, 1))
    return folder


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, sources: Path) -> Iterator[Path]:
    """The folder that the library is looked for in, and nothing remembered."""
    monkeypatch.setattr(native, "FOLDER", sources)
    monkeypatch.delenv("OUTRIDER_ISA", raising=False)
    native.library.cache_clear()
    yield sources
    native.library.cache_clear()


@compiled
def test_builds_what_this_machine_can_compile_and_says_what_it_left_out(fresh: Path) -> None:
    built = build_into(fresh, fresh)
    assert built.instruction_sets[-1] == "portable" and len(built.instruction_sets) == 2
    assert "avx512" in built.left_out  # of another machine, or no C++
    loaded = native.library()
    assert loaded.outrider_answer() == 42
    assert getattr(loaded, f"outrider_has_{built.instruction_sets[0]}")() == 1
    assert native.library() is loaded and native.why_not() is None
    assert (native.instructions(), native.num_threads()) == ("portable", 2)
    assert sorted(file.name for file in fresh.iterdir()) == sorted([*SOURCES, NAME]), "no scraps"


@compiled
@pytest.mark.parametrize("name", ["api.cpp", "isa_portable.cpp"])
def test_a_base_file_that_fails_is_told_with_the_compilers_words(sources: Path, name: str) -> None:
    (sources / name).write_text("int main( { return 0; }")
    (sources / NAME).write_text("what was there before")
    with pytest.raises(BuildError, match=rf"^compiling {name} failed: .*error: .*$") as caught:
        build(sources, sources / NAME)
    assert "\n" not in str(caught.value)
    assert (sources / NAME).read_text() == "what was there before"


def test_no_sources_and_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="there are no C\\+\\+ sources in"):
        build(tmp_path, tmp_path / NAME)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler was found \\(there is none of c\\+\\+, g\\+\\+, clang"):
        build(sources, sources / NAME)
    monkeypatch.setenv("CXX", "/nonexistent -O1")
    with pytest.raises(BuildError, match="CXX names /nonexistent -O1, which is not there"):
        build(sources, sources / NAME)
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.raises(BuildError, match="asking the compiler for its machine failed"):
        build(sources, sources / NAME)


def test_why_there_is_no_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cure = "install a C\\+\\+ compiler, then outrider once more with pip$"
    with pytest.raises(NativeMissingError, match=f"was not built: nobody tried when outrider was installed; {cure}"):
        native.library()
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(BuildError):
        build_into(fresh, fresh)
    assert "/nonexistent" in (fresh / REASON).read_text()
    with pytest.raises(NativeMissingError, match=f"was not built: no C\\+\\+ compiler was found .*; {cure}"):
        native.library()
    (fresh / NAME).write_text("no library")
    with pytest.raises(NativeMissingError, match=f"cannot be loaded: .*; {cure}"):
        native.library()
    os.utime(fresh / "api.cpp")
    os.utime(fresh / NAME, (2, 2))
    with pytest.raises(NativeMissingError, match=r"older than its source api\.cpp; build it again with python -m"):
        native.library()
    assert "older than its source" in (native.why_not() or "")


@compiled
@pytest.mark.parametrize(
    "told, message",
    [("return 7;", f"has interface 7, this version needs {native.ABI}"), (None, "is not of this version")],
)
def test_a_library_of_another_version(fresh: Path, told: str | None, message: str) -> None:
    for name in SOURCES:
        (fresh / name).unlink()
    text = "" if told is None else SOURCES["api.cpp"].replace(f"return {native.ABI};", told, 1)
    (fresh / "api.cpp").write_text(text.replace("return portable_answer();", "return 0;"))
    build_into(fresh, fresh)
    with pytest.raises(NativeMissingError, match=f"{message}.*build it again"):
        native.library()


@compiled
def test_the_instruction_set_can_be_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_into(fresh, fresh)
    monkeypatch.setenv("OUTRIDER_ISA", "quick")
    with pytest.raises(ConfigError, match="OUTRIDER_ISA is 'quick'; this machine has fast, portable, choose one"):
        native.why_not()
    monkeypatch.setenv("OUTRIDER_ISA", "fast")
    assert native.instructions() == "fast"


@compiled
def test_the_hook_makes_a_wheel_of_this_platform_or_a_pure_one(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    project = tmp_path / "project"
    (project / "src" / "outrider" / "native").mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        (project / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("", "native"):
        for file in (ROOT / "src" / "outrider" / folder).glob("*.py"):
            (project / "src" / "outrider" / folder / file.name).write_bytes(file.read_bytes())
    for name, text in SOURCES.items():
        (project / "src" / "outrider" / "native" / name).write_text(text)

    def wheel(**environment: str) -> tuple[str, set[str], str]:
        out = tmp_path / f"out-{len(environment)}-{'-'.join(environment.values()).replace('/', '')}"
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
        done = subprocess.run(
            command, cwd=project, capture_output=True, text=True, check=True, env=os.environ | environment
        )
        (path,) = out.glob("*.whl")
        return path.name, {Path(name).name for name in zipfile.ZipFile(path).namelist()}, done.stdout + done.stderr

    name, files, _ = wheel()
    assert "-py3-none-" in name and "any" not in name
    assert NAME in files and REASON not in files and "api.cpp" not in files
    name, files, told = wheel(CXX="/nonexistent")
    assert name.endswith("-py3-none-any.whl") and NAME not in files and REASON in files
    assert "native library was not built: no C++ compiler was found" in told
    name, files, _ = wheel(OUTRIDER_NATIVE="0")
    assert name.endswith("-py3-none-any.whl") and NAME not in files
    assert not (project / "src" / "outrider" / "native" / NAME).exists(), "wheels leave the tree alone"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    model = tiny("llama")
    save_folder(model, folder / "folder")
    save_gguf(model, folder / "model.gguf")
    save_gguf(tiny("mamba"), folder / "mamba.gguf")
    return {name: open_model(folder / name) for name in ("folder", "model.gguf", "mamba.gguf")}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "may_have_cuda", lambda: False)


@pytest.mark.usefixtures("on_cpu")
def test_which_backend_runs_what(files: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "why_not", lambda: None)
    monkeypatch.setattr(runner, "library", lambda: None)
    auto = ModelConfig()
    assert choose(files["model.gguf"], auto) == ("native", "cpu", "", False)
    assert choose(files["folder"], auto) == ("torch", "cpu", "it is no GGUF file", False)
    assert choose(files["mamba.gguf"], auto) == ("torch", "cpu", "mamba models run on torch only", False)
    assert choose(files["model.gguf"], ModelConfig(backend="torch"))[:2] == ("torch", "cpu")
    forced = ModelConfig(backend="native", strict=True)
    assert choose(files["model.gguf"], forced)[:2] == ("native", "cpu")
    with pytest.raises(ConfigError, match="mamba does not run natively: mamba models run on torch only; leave the b"):
        choose(files["mamba.gguf"], forced)
    with pytest.raises(ConfigError, match="the native backend runs on the CPU, not on cuda:1") as caught:
        choose(files["model.gguf"], ModelConfig(backend="native", device="cuda:1"))
    assert caught.value.param == "device"
    monkeypatch.setattr(runner, "device_name", lambda config: "cuda")
    assert choose(files["model.gguf"], auto)[:3] == ("torch", "cuda", "on cuda")


native_here = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))


@native_here
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "target, draft, kinds, shares",
    [
        ("model.gguf", "model.gguf", ["NativeBackend", "NativeBackend"], True),
        ("model.gguf", "folder", ["NativeBackend", "TransformerBackend"], False),
        ("folder", "model.gguf", ["TransformerBackend", "NativeBackend"], False),
        ("model.gguf", "mamba.gguf", ["NativeBackend", "MambaBackend"], False),
    ],
)
def test_backends_mix_and_share_pages_with_their_own_kind(
    files: dict[str, Any], target: str, draft: str, kinds: list[str], shares: bool
) -> None:
    plain = Engine.load(files[target].path, context=64, draft="none").generate([1, 2, 3], max_tokens=8, temperature=0)
    engine = Engine.load(files[target].path, draft=files[draft].path, width=3, context=64, threads=1)
    drafter = engine.loop.router.drafters["model"]
    assert [type(one).__name__ for one in (engine.loop.target, drafter.backend)] == kinds
    assert drafter.shares_slots is shares
    assert engine.generate([1, 2, 3], max_tokens=8, temperature=0).token_ids == plain.token_ids


@native_here
def test_the_whole_cpu_path_without_torch(files: dict[str, Any]) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from outrider.engine.engine import Engine
path = {str(files["model.gguf"].path)!r}
for draft in ("none", "ngram", "suffix", "layerskip:1", path, "suffix," + path):
    engine = Engine.load(path, draft=draft, context=64)
    print(engine.generate([1, 2, 3], max_tokens=6, temperature=0).token_ids)
"""
    told = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert len(told) == 6 and len(set(told)) == 1


@pytest.mark.usefixtures("on_cpu")
def test_without_the_library_torch_runs_and_it_is_said_once(
    files: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "why_not", lambda: "the native library was not built: reasons; the cure")
    path = files["model.gguf"].path
    with caplog.at_level(logging.WARNING, "outrider"):
        engine = Engine.load(path, draft=path, context=64)
    assert type(engine.loop.target).__name__ == "TransformerBackend"
    assert [record.message for record in caplog.records] == [
        "torch runs the model, several times slower: the native library was not built: reasons; the cure"
    ]
    monkeypatch.setattr(runner, "has_torch", lambda: False)
    with pytest.raises(MissingPackageError, match=r"model cannot run: .* the cure, or torch with pip install"):
        Engine.load(path)
    with pytest.raises(
        MissingPackageError, match=r"folder needs torch; install it with pip install 'outrider\[torch\]"
    ):
        Engine.load(files["folder"].path)
    with pytest.raises(MissingPackageError, match="the device cuda needs torch"):
        Engine.load(path, device="cuda")
    monkeypatch.setattr(runner, "why_not", lambda: None)
    with pytest.raises(MissingPackageError, match="a Medusa head needs torch; install it with pip install"):
        Engine.load(path, draft="medusa:/no/head", context=64)


def test_looking_for_cuda_imports_torch_only_where_there_may_be_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "sys", SimpleNamespace(modules={}, platform="linux"))
    monkeypatch.setattr(runner, "Path", lambda _: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not may_have_cuda()
    assert device_name(ModelConfig()) == "cpu"
    (tmp_path / "nvidiactl").touch()
    assert may_have_cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not may_have_cuda()
    monkeypatch.setattr(runner, "has_torch", lambda: False)
    monkeypatch.setattr(runner, "may_have_cuda", lambda: True)
    assert device_name(ModelConfig()) == "cpu", "a card is no use without torch"
