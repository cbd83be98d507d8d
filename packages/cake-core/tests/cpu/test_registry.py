"""Ops are found by entry points; a broken declaration disables itself alone."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cake_core import __version__, config, hooks, registry
from cake_core.spec import OpSpec
from packaging.requirements import Requirement

PACKAGES = Path(__file__).resolve().parents[3]


def spec(name: str, **fields: Any) -> OpSpec:
    given = {
        "variants": ("det", "fast"),
        "selected_by": ((f"{name}_backend", "cake"),),
        "impl": f"cake_{name}.api",
        "entry_points": ("run",),
    }
    return OpSpec(name, **{**given, **fields})


@dataclass
class Dist:
    name: str
    version: str = "1.2"
    requires: list[str] = field(default_factory=lambda: ["torch>=2.11", "cake-core<0.3,>=0.2"])


@dataclass
class Entry:
    name: str
    result: Any
    dist: Dist | None = None

    def load(self) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


Install = Callable[..., list[str]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the entry points of the environment; returns the groups that were asked for."""

    def replace(*entries: Entry) -> list[str]:
        asked: list[str] = []

        def entry_points(*, group: str) -> list[Entry]:
            asked.append(group)
            return list(entries)

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        registry.refresh()
        return asked

    yield replace
    monkeypatch.undo()
    registry.refresh()


def test_entry_points_are_read_once_and_at_the_first_question(install: Install) -> None:
    """R3: lazily, one scan whatever is asked; refresh scans again."""
    asked = install(Entry("b", spec("b"), Dist("cake-b")), Entry("a", spec("a"), Dist("cake-a")))
    assert asked == []
    assert registry.ops() == ("a", "b")
    assert registry.op_spec("b").name == "b"
    assert registry.distribution("a") == ("cake-a", "1.2")
    assert registry.failures() == {}
    assert asked == ["cake.ops"]
    registry.refresh()
    registry.ops()
    assert asked == ["cake.ops", "cake.ops"]


def test_threads_that_ask_first_share_one_scan(install: Install) -> None:
    """R3: one scan for all threads."""

    class Slow(Entry):
        def load(self) -> Any:
            time.sleep(0.05)
            return self.result

    asked = install(Slow("a", spec("a")))
    threads = [threading.Thread(target=registry.ops) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == ["cake.ops"]


def test_a_declaration_that_fails_to_import_disables_only_itself(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """R4: other ops work, the broken one raises from its own error, one warning is logged."""
    cause = ImportError("libmissing is not there")
    install(Entry("good", spec("good"), Dist("cake-good")), Entry("bad", cause, Dist("cake-bad")))
    assert registry.ops() == ("good",)
    assert config.variant("good") == "det"
    with pytest.raises(RuntimeError, match=r"variant: op is 'bad'.*libmissing is not there") as caught:
        config.variant("bad")
    assert caught.value.__cause__ is cause
    assert registry.failures() == {"bad": "ImportError: libmissing is not there"}
    import argparse

    with caplog.at_level(logging.WARNING, "cake"):
        for _ in range(2):
            hooks.add_arguments(argparse.ArgumentParser())
    assert [record.getMessage() for record in caplog.records] == [
        "op bad is disabled: ImportError: libmissing is not there"
    ]


def test_two_distributions_with_one_name_disable_it_and_are_both_named(install: Install) -> None:
    """R5: neither declaration wins."""
    install(
        Entry("a", spec("a"), Dist("cake-a")), Entry("a", spec("a"), Dist("other-a", "7")), Entry("b", spec("b"), None)
    )
    with pytest.raises(RuntimeError, match=r"cake-a 1\.2 and other-a 7"):
        registry.op_spec("a")
    assert registry.ops() == ("b",)


def test_an_unknown_op_is_answered_with_what_is_installed(install: Install) -> None:
    """R6: installed ops, the nearest name, and the pip command for an op of the project."""
    install(Entry("gdn", spec("gdn")), Entry("kda", spec("kda")))
    with pytest.raises(ValueError, match=r"op_spec: op is 'gqa'.*gdn, kda.*\(pip install cake-gqa\)"):
        registry.op_spec("gqa")
    with pytest.raises(ValueError, match=r"'gdm'.*did you mean 'gdn'"):
        registry.op_spec("gdm")
    with pytest.raises(ValueError, match="'nothing'") as caught:
        registry.op_spec("nothing")
    assert "pip" not in str(caught.value)
    with pytest.raises(TypeError, match="op is 3"):
        registry.op_spec(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", ["op_spec", "variant", "option", "variant_is_default", "op_folder"])
def test_the_message_names_the_function_that_the_user_called(entry: str) -> None:
    """R6: not the look-up inside."""
    calls: dict[str, Callable[[], Any]] = {
        "op_spec": lambda: registry.op_spec("nothing"),
        "variant": lambda: config.variant("nothing"),
        "option": lambda: config.option("nothing", "cake_nothing_x"),
        "variant_is_default": lambda: config.variant_is_default("nothing"),
        "op_folder": lambda: registry.op_folder("nothing"),
    }
    with pytest.raises(ValueError, match=f"^{entry}: op is 'nothing'"):
        calls[entry]()


def test_another_contract_version_is_refused_with_the_core_to_install(install: Install) -> None:
    """R7: the range comes from the op's own requirement; without one, the direction."""
    newer = Entry("a", spec("a", api=2), Dist("cake-a"))
    install(newer, Entry("b", spec("b", api=2)), Entry("c", spec("c", api=0)), Entry("d", spec("d")))
    assert registry.ops() == ("d",)
    with pytest.raises(RuntimeError, match=r"api is 2; needs 1 \(pip install 'cake-core<0\.3,>=0\.2'\)"):
        registry.op_spec("a")
    assert registry.failures()["b"].endswith(f"(pip install 'cake-core>{__version__}')")
    assert registry.failures()["c"].endswith(f"(pip install 'cake-core<{__version__}')")


def test_an_entry_point_under_another_name_or_type_disables_only_itself(install: Install) -> None:
    """R2: the entry-point name is the op's name, its value an OpSpec."""
    install(Entry("a", spec("b")), Entry("c", object(), Dist("cake-c")), Entry("d", spec("d")))
    assert registry.ops() == ("d",)
    assert "'b'" in registry.failures()["a"]
    assert "'a'" in registry.failures()["a"]
    assert "cake-c 1.2 is of type object; needs an OpSpec" in registry.failures()["c"]


def test_two_ops_cannot_share_a_flag(install: Install) -> None:
    """R2: the flag of one op may look like that of another whose name is longer."""
    from cake_core.spec import Flag

    shared = Flag("cake_a_b_rows", kind="int", help="rows")
    install(Entry("a", spec("a", flags=(shared,))), Entry("a_b", spec("a_b", flags=(shared,))))
    assert registry.ops() == ("a",)
    assert "'cake_a_b_rows'" in registry.failures()["a_b"]


def test_override_replaces_the_registry_inside_the_block_only() -> None:
    """R16: nested blocks too; every change has its own epoch."""
    installed, epochs = registry.ops(), [registry.epoch()]
    with registry.override({"a": spec("a")}):
        epochs.append(registry.epoch())
        assert registry.ops() == ("a",)
        assert registry.distribution("a") is None
        with registry.override({}):
            epochs.append(registry.epoch())
            assert registry.ops() == ()
        epochs.append(registry.epoch())
        assert registry.ops() == ("a",)
    epochs.append(registry.epoch())
    assert registry.ops() == installed
    assert len(set(epochs)) == len(epochs)
    with pytest.raises(KeyError), registry.override({"a": spec("a")}):
        raise KeyError
    assert registry.ops() == installed


def test_the_op_folder_is_found_without_importing_the_implementation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cake_folder_probe" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("raise AssertionError('the op package was imported')")
    (package / "api.py").write_text("raise AssertionError('the implementation was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    specs = {
        "probe": spec("probe", impl="cake_folder_probe.inner.api"),
        "gone": spec("gone", impl="cake_folder_gone.inner.api"),
    }
    with registry.override(specs):
        assert registry.op_folder("probe") == package
        assert "cake_folder_probe.inner" not in sys.modules
        with pytest.raises(RuntimeError, match=r"'gone'.*'cake_folder_gone\.inner'"):
            registry.op_folder("gone")


def test_the_table_of_known_ops_agrees_with_every_installed_declaration() -> None:
    """R6, R19: the hint for a missing op is what its declaration would say."""
    assert registry.failures() == {}
    for name in registry.ops():
        known = registry.KNOWN_OPS[name]
        assert registry.op_spec(name).selected_by == known.selectors
        found = registry.distribution(name)
        assert found is not None
        assert found[0] == known.distribution
        assert registry.op_folder(name).is_dir()


def test_every_op_accepts_the_core_of_this_workspace() -> None:
    """R84: uv does not compare the ranges of workspace members."""
    projects = [tomllib.loads(path.read_text())["project"] for path in PACKAGES.glob("*/pyproject.toml")]
    versions = {project["name"]: project["version"] for project in projects}
    assert versions["cake-core"] == __version__
    for project in projects:
        requirements = [Requirement(text) for text in project.get("dependencies", ())]
        on_core = [requirement for requirement in requirements if requirement.name == "cake-core"]
        assert bool(on_core) == (project["name"] != "cake-core"), project["name"]
        for requirement in on_core:
            assert requirement.specifier.contains(__version__), project["name"]
            assert len(requirement.specifier) == 2, f"{project['name']} needs a lower and an upper bound"
