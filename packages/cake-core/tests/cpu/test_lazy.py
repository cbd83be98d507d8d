"""Importing a package, a declaration or a hook is torch-free; entry points are imported at their first use."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cake_core
import pytest
from cake_core import registry

HEAVY = ("torch", "tvm_ffi", "numpy", "rich")
ON_TENSORS = {
    f"cake_core.{name}" for name in ("cpu_math", "first_order", "graphs", "layout", "operands")
}  # of implementations alone


def torch_free_modules() -> list[str]:
    """Modules of cake_core, every hook, and per installed op its packages, its declaration and its planner."""
    found = {"cake_core", *(f"cake_core.{module.name}" for module in pkgutil.iter_modules(cake_core.__path__))}
    found -= ON_TENSORS
    for entry in importlib.metadata.entry_points(group="miles.ext_kernels"):
        found.add(entry.module)
    for entry in importlib.metadata.entry_points(group=registry.GROUP):
        package = entry.module.rpartition(".")[0]
        found.update({entry.module, package, package.partition(".")[0], f"{package}.plan"})
    return sorted(found)


def lazy_packages() -> list[str]:
    found = {"cake_core", "cake_core.testing.synthetic_op"}
    for entry in importlib.metadata.entry_points(group=registry.GROUP):
        found.add(entry.module.rpartition(".")[0])
    return sorted(found)


def test_importing_a_package_a_declaration_or_a_hook_is_light() -> None:
    """R1: no torch, tvm_ffi, numpy or rich comes with any; what uses torch imports it at first use."""
    code = (
        "import sys, importlib\n"
        f"for module in {torch_free_modules()}:\n"
        "    importlib.import_module(module)\n"
        f"    heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "    assert not heavy, f'{module} imports {heavy}'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_imports_work_in_an_environment_without_torch() -> None:
    """R1: an import guard that hides a missing torch would pass the test above."""
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({HEAVY}))\n"
        f"for module in {torch_free_modules()}:\n"
        "    importlib.import_module(module)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_configuring_and_reading_a_variant_is_light() -> None:
    """R1: neither the driver nor a worker needs torch before the model is built."""
    code = (
        "import sys; from types import SimpleNamespace; from cake_core import config, hooks, registry\n"
        "args = SimpleNamespace(); hooks.validate_args(args); hooks.configure(args)\n"
        "assert [config.variant(op) for op in registry.ops()]; config.snapshot(); config.torch_deterministic()\n"
        f"print(*[name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose one entry point counts the imports of its implementation in a file."""
    folder = tmp_path / "lazy_probe"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from cake_core.lazy import attach\n"
        "__getattr__, __dir__, __all__ = attach(__name__, {'run': '.api', 'check_supported': '.op'})\n"
    )
    (folder / "op.py").write_text("def check_supported(): pass\n")
    (folder / "api.py").write_text(
        "from pathlib import Path\n"
        "count = Path(__file__).with_name('count')\n"
        "count.write_text(str(int(count.read_text()) + 1 if count.exists() else 1))\n"
        "if Path(__file__).with_name('broken').exists():\n"
        "    raise ImportError('libmissing is not there', name='libmissing')\n"
        "def run(): return 'ran'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_probe"]:
        del sys.modules[name]


def test_an_entry_point_imports_its_implementation_once(package: Path) -> None:
    """R8: at the first use, and listed before it."""
    probe = importlib.import_module("lazy_probe")
    assert {"run", "check_supported", "__name__"} <= set(dir(probe))
    assert probe.__all__ == ["check_supported", "run"]
    assert probe.check_supported() is None
    assert "lazy_probe.api" not in sys.modules
    for _ in range(2):
        from lazy_probe import run  # type: ignore[import-not-found]

        assert run() == probe.run() == "ran"
    assert (package / "count").read_text() == "1"
    assert "run" in vars(probe)
    with pytest.raises(AttributeError, match="module 'lazy_probe' has no attribute 'walk'"):
        _ = probe.walk
    with pytest.raises(ImportError, match="walk"):
        from lazy_probe import walk  # type: ignore[import-not-found]  # noqa: F401


def test_an_entry_point_pickles_by_reference(package: Path) -> None:
    """R8: another process finds it by name."""
    probe = importlib.import_module("lazy_probe")
    data = pickle.dumps(probe.run)
    assert pickle.loads(data) is probe.run
    code = f"import sys, pickle; sys.path.insert(0, {str(package.parent)!r}); print(pickle.loads({data!r})())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ran"


def test_a_failing_implementation_surfaces_unchanged_and_is_tried_again(package: Path) -> None:
    """R10: nothing of the failure is kept."""
    probe = importlib.import_module("lazy_probe")
    (package / "broken").touch()
    for _ in range(2):
        with pytest.raises(ImportError, match=r"^libmissing is not there$") as caught:
            _ = probe.run
        assert caught.value.name == "libmissing"
    assert (package / "count").read_text() == "2"
    (package / "broken").unlink()
    assert probe.run() == "ran"
    assert (package / "count").read_text() == "3"


@pytest.mark.parametrize("name", lazy_packages())
def test_type_checkers_see_exactly_the_lazy_names(name: str) -> None:
    """R8: the imports under TYPE_CHECKING are the attached exports, from the same modules."""
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text())
    checked: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                module = "." * statement.level + (statement.module or "")
                checked.update({alias.asname or alias.name: module for alias in statement.names})
    attached: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attach":
            attached = ast.literal_eval(node.args[1])
    assert checked == attached
    assert attached
