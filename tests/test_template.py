"""A package made from templates/op fulfils the op contract, passes its own tests, and compiles."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from cake_core import manifest, prebuild, ptxas, registry
from cake_core.testing import contract

ROOT = Path(__file__).resolve().parent.parent
NAME = "token_square"  # an underscore, so that op, module and distribution names differ


def new_op() -> ModuleType:
    """tools/new_op.py as a module."""
    spec = importlib.util.spec_from_file_location("new_op", ROOT / "tools" / "new_op.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = new_op()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package of the template with its build.json, importable for the module."""
    folder = tmp_path_factory.mktemp("made") / "cake-token-square"
    tool.create(NAME, folder)
    kernels = folder / "src" / f"cake_{NAME}" / "kernels"
    assert manifest.write(kernels)
    sys.path.insert(0, str(folder / "src"))
    try:
        yield folder
    finally:
        sys.path.remove(str(folder / "src"))
        for module in [name for name in sys.modules if name.split(".")[0] == f"cake_{NAME}"]:
            del sys.modules[module]


@pytest.fixture
def op(package: Path) -> Iterator[str]:
    """The op of that package, registered for one test."""
    declaration = importlib.import_module(f"cake_{NAME}.op").OP
    with registry.override({NAME: declaration}):
        yield NAME


@pytest.mark.parametrize("requirement", contract.REQUIREMENTS)
def test_an_op_of_the_template_fulfils_the_contract(requirement: str, op: str) -> None:
    contract.REQUIREMENTS[requirement](op)


class Outcomes:
    """A pytest plugin that keeps how the calls of the tests of a nested run ended."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.ended[report.nodeid] = f"{report.when} {report.outcome}\n{report.longreprtext}"


def test_the_tests_of_the_template_pass_in_the_made_package(package: Path) -> None:
    """In this process, which has torch already: a child would spend most of its time on importing it again."""
    outcomes = Outcomes()
    options = ("-q", "--import-mode=importlib", "-p", "no:cacheprovider", f"--rootdir={package}")
    status = pytest.main([*options, str(package / "tests")], plugins=[outcomes])
    wrong = {test: text for test, text in outcomes.ended.items() if text.strip() != "call passed"}
    assert not wrong, "\n".join(f"{test}: {text}" for test, text in wrong.items())
    assert status == 0
    assert outcomes.ended


def test_the_example_of_the_readme_runs(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (package / "README.md").read_text(), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("tensor(")


def test_the_manifest_is_up_to_date_and_names_what_the_plan_names(package: Path, op: str) -> None:
    kernels = package / "src" / f"cake_{NAME}" / "kernels"
    assert manifest.check(kernels) == ()
    plan = importlib.import_module(f"cake_{NAME}.plan")
    libraries = {name for arch in plan.ARCHS for name in plan.libraries(arch)[NAME]}
    assert set(manifest.load_manifest(kernels).names()) == libraries


@pytest.mark.nvcc
def test_the_kernels_compile_within_their_limits(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Path
) -> None:
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path))
    paths = prebuild(op, arch="sm_90a")
    assert [path.name for path in paths] == [f"{NAME}_bwd_sm_90a.so", f"{NAME}_fwd_sm_90a.so"]
    loaded = manifest.load_manifest(package / "src" / f"cake_{NAME}" / "kernels")
    for path in paths:
        sidecar = json.loads((path.parent / "build_info.json").read_text())
        assert ptxas.check_limits(loaded.library(path.stem).limits, sidecar) == ()


def test_no_placeholder_is_left(package: Path) -> None:
    for file in package.rglob("*"):
        if "__pycache__" in file.parts:
            continue
        assert "__op__" not in file.name
        assert "__dist__" not in file.name
        if file.is_file():
            assert not re.search(r"__(op|dist)__", file.read_text()), file


def test_the_made_project_declares_its_op_under_its_own_names(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == "cake-token-square"
    assert project["entry-points"]["cake.ops"] == {NAME: f"cake_{NAME}.op:OP"}
    assert (package / "src" / f"cake_{NAME}" / "py.typed").is_file()
    norms = tomllib.loads((ROOT / "packages" / "cake-norms" / "pyproject.toml").read_text())["project"]
    for key in ("requires-python", "license", "classifiers", "dependencies"):
        assert project[key] == norms[key], f"{key} differs from the other op packages"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Gelu", "lower-case"),
        ("2d", "a letter first"),
        ("a-b", "underscores"),
        ("a__b", "single underscores"),
        ("a_", "single underscores"),
        ("", "lower-case"),
        ("lambda", "keyword"),
        ("match", "keyword"),
        ("plan", "templates/op does not use"),  # a module of the package
        ("kernels", "templates/op does not use"),
        ("torch", "templates/op does not use"),  # an import
        ("dy", "templates/op does not use"),  # an argument
        ("squared_relu", "templates/op does not use"),  # a function of the oracle
        ("rmsnorm", "cake-norms has it"),
        ("norms", "cake-norms has it"),
        ("core", "cake-core has it"),
    ],
)
def test_an_invalid_or_taken_name_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        tool.check_name(name)
    assert f"NAME is {name!r}" in str(caught.value)


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "packages" / "cake-swiglu").mkdir(parents=True)
    with pytest.raises(ValueError, match="packages/cake-swiglu exists"):
        tool.check_name("swiglu", tmp_path)


def test_registering_adds_one_source_and_one_line_of_the_dev_group() -> None:
    before = (ROOT / "pyproject.toml").read_text()
    after = tool.register(before, NAME)
    old, new = tomllib.loads(before), tomllib.loads(after)
    assert new["dependency-groups"]["dev"].count("cake-token-square") == 1
    assert new["tool"]["uv"]["sources"]["cake-token-square"] == {"workspace": True}
    new["dependency-groups"]["dev"].remove("cake-token-square")
    del new["tool"]["uv"]["sources"]["cake-token-square"]
    assert new == old
    assert len(after.splitlines()) == len(before.splitlines()) + 2


@pytest.mark.parametrize(
    "text", ['[tool.uv.workspace]\nmembers = ["libs/*"]\n', '[tool.uv.workspace]\nmembers = ["packages/*"]\n']
)
def test_a_root_file_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="root pyproject"):
        tool.register(text, NAME)


def test_the_command_makes_the_package_and_prints_the_next_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.main([NAME]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("uv ")] == tool.next_steps(NAME)
    assert any(line.startswith("uv run cake manifest cake-token-square ") for line in printed)
    assert (tmp_path / "packages" / "cake-token-square" / "src" / f"cake_{NAME}" / "op.py").is_file()
    assert "cake-token-square = { workspace = true }" in (tmp_path / "pyproject.toml").read_text()
    assert tool.main([NAME]) == 1
    assert f"NAME is {NAME!r}; needs a new name" in capsys.readouterr().err


def test_the_guide_lists_the_steps_that_the_command_prints() -> None:
    guide = (ROOT / "docs" / "adding_an_op.md").read_text()
    assert guide.split("```\n")[1].splitlines() == tool.next_steps("NAME")
    assert len({line.index("  # ") for line in tool.next_steps("softcap")}) == 1, "the hints are not one column"


NAMES = ("softcap", "token_shift", "zz", "aa", "a_name_of_many_words_for_one_op")


def test_a_fresh_package_of_any_name_is_lint_clean_once_it_is_formatted(tmp_path: Path) -> None:
    """Names that sort before and after every other import, a short and a long one."""
    shutil.copy(ROOT / "ruff.toml", tmp_path)
    for name in NAMES:
        tool.create(name, tmp_path / "packages" / tool.distribution(name))
    for command in (("format", "-q"), ("check", "--output-format=concise")):
        run = subprocess.run(
            (sys.executable, "-m", "ruff", *command, "--no-cache", "."), cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_kernels_of_a_fresh_package_are_formatted_for_any_name(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".clang-format", tmp_path)
    for name in NAMES:
        tool.create(name, tmp_path / name)
    files = [file for file in sorted(tmp_path.rglob("csrc/*")) if file.suffix in {".cu", ".cuh", ".cc", ".h"}]
    assert len(files) >= 5 * len(NAMES)
    formatter = Path(sys.executable).with_name("clang-format")
    run = subprocess.run((formatter, "--dry-run", "--Werror", *files), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
