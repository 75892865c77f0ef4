"""The shape of the project: layers, imports, commands, README."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "outrider"
# A module imports only lower ranks or its own package.
RANK = {
    **dict.fromkeys(("types", "errors", "checks", "config", "metrics", "serving", "clock", "jsonfile"), 0),
    **dict.fromkeys(("tokenizer", "sampling", "kv", "models"), 1),
    **dict.fromkeys(("native", "backends"), 2),  # native is the lower of the two
    "draft": 3,
    "spec": 4,
    "sched": 5,
    "engine": 6,
    **dict.fromkeys(("bench", "server", "train"), 7),
    "cli": 8,
    "__main__": 9,
}


def internal_imports() -> Iterator[tuple[str, str]]:
    """(package, imported package) for every import inside outrider, those in functions included."""
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module] if node.module != "outrider" else [f"outrider.{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} imports relatively"
            for name in names:
                if name.startswith("outrider."):
                    yield package, name.split(".")[1]


def test_layers() -> None:
    own = {"__version__"}
    within_rank_0 = {("types", "errors"), ("types", "metrics"), ("types", "checks")}
    within_rank_0 |= {("config", "errors"), ("config", "checks"), ("checks", "errors"), ("jsonfile", "errors")}
    within_rank_2 = {("backends", "native")}
    checked = 0
    for package, imported in internal_imports():
        if package == "__init__" or imported in own:
            continue
        allowed = package == imported or RANK[imported] < RANK[package]
        allowed |= (package, imported) in within_rank_0 | within_rank_2
        assert allowed, f"{package} may not import {imported}"
        checked += 1
    assert checked > 50


def test_only_build_names_concrete_classes() -> None:
    concrete = ("MockBackend", "NativeBackend", "TransformerBackend", "MambaBackend", "HFBackend")
    concrete += ("ModelDrafter", "NgramDrafter", "NoDrafter", "SuffixDrafter", "LayerSkipDrafter", "TranslatedDrafter")
    concrete += ("ReencodeDrafter", "MedusaDrafter", "EagleDrafter")
    for path in (*SOURCE.glob("engine/*.py"), *SOURCE.glob("spec/*.py"), *SOURCE.glob("sched/*.py")):
        if path.name not in ("build.py", "loading.py"):  # loading is the part of build that reads files
            assert not [name for name in concrete if name in path.read_text()], path


@pytest.mark.parametrize(
    "code", ["import outrider", "from outrider.cli.main import app", "import outrider.engine.build"]
)
def test_importing_loads_no_torch(code: str) -> None:
    heavy = "[m for m in ('torch', 'fastapi', 'transformers') if m in sys.modules]"
    assert subprocess.check_output([sys.executable, "-c", f"import sys\n{code}\nprint({heavy})"], text=True) == "[]\n"


def test_what_runs_without_torch() -> None:
    """All but torch's own backends, the states they keep, trained heads and a benchmark of torch."""
    code = (
        "import sys, pkgutil, importlib, outrider\n"
        "others = ('outrider.__main__', 'outrider.native._native')\n"  # the library is no module
        "sys.modules['torch'] = None\n"
        "for module in pkgutil.walk_packages(outrider.__path__, 'outrider.'):\n"
        "    try:\n        importlib.import_module(module.name) if module.name not in others else None\n"
        "    except ImportError as error:\n        print(module.name, error.name)\n"
        "    except outrider.OutriderError as error:\n        print(module.name, 'torch')\n"
    )
    told = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    cuda = [
        "attending",
        "backend",
        "choosing",
        "eagle",
        "forward",
        "graphs",
        "head_chain",
        "head_program",
        "judged_chains",
        "judging",
    ]
    cuda += [
        "kernels",
        "launching",
        "layout",
        "measuring",
        "passes",
        "products",
        "program",
        "rolling",
        "sampling",
        "twins",
    ]
    theirs = ["attention", *(f"cuda.{name}" for name in cuda)]
    theirs += ["eagle_head", "forward", "heads", "hf", "hf_probe", "mamba", "medusa_head"]
    theirs += ["torch_common", "transformer", "weights"]
    expected = [f"outrider.backends.{name} torch" for name in theirs]
    expected += [
        f"outrider.{name} torch"
        for name in (
            "bench.gpu",
            "bench.gpu_checks",
            "bench.gpu_peers",
            "bench.gpu_rounds",
            "draft.medusa",
        )
    ]
    expected += [f"outrider.{name} torch" for name in ("kv.recurrent", "kv.store")]
    training = ("distance", "eagle", "features", "headfile", "net", "optimizer", "run")
    expected += [f"outrider.train.{name} torch" for name in training]
    assert told == expected


def test_help_loads_no_torch_and_no_numpy() -> None:
    code = (
        "import sys\nfrom outrider.cli.main import main\nsys.argv = ['outrider', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "generate" in out and "chat" in out and "models" in out and "bench" in out and out.endswith("[]\n")


def test_bench_measures_engine_time() -> None:
    """That it runs and is consistent; the numbers themselves are the command's business."""
    from outrider.bench.overhead import engine_time, noise_time

    reading = engine_time("rejection", width=2, batch=2, vocab_size=32, num_tokens=10, repeats=2)
    assert 0 < reading.low_us <= reading.median_us <= reading.high_us and reading.median_us < reading.wall_us
    assert noise_time(32, 1).median_us > 0


def test_the_example_of_a_model_of_ones_own() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_model.py")], capture_output=True, text=True, check=True
    )
    assert "40 tokens in" in done.stdout and "passes instead of 40" in done.stdout


def test_readme_python_runs() -> None:
    """The README's Python examples are executed as they stand."""
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    assert blocks
    for block in blocks:
        exec(compile(block.split("```")[0], "README.md", "exec"), {})


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Every name in docs/grafana.json is one that a server tells."""
    from outrider.backends.paged_mock import PagedMock
    from outrider.engine.engine import Engine
    from outrider.server.metrics import HttpMetrics, exposition

    engine = Engine(PagedMock())
    engine.generate([1, 2, 3], max_tokens=4)
    told = exposition(engine, HttpMetrics(), "mock")
    asked = set(re.findall(r"outrider_\w+", (ROOT / "docs" / "grafana.json").read_text()))
    assert len(asked) >= 20
    assert not [name for name in asked if f"# TYPE {name.removesuffix('_bucket')} " not in told]
