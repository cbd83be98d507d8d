"""Broken declarations, arguments of the wrong kind, hostile environments: each is answered with its cause."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cake_core import build, compiler, config, env, hooks, lifecycle, registry, toolchain, workspace
from cake_core.errors import check_float
from cake_core.spec import OpSpec
from cake_core.testing.fake_toolchain import FakeToolchain


def spec(name: str) -> OpSpec:
    return OpSpec(name, ("det", "fast"), ((f"{name}_backend", "cake"),), f"cake_{name}.api", ("run",))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


class Entry:
    def __init__(self, name: str, result: Any, dist: Any = None) -> None:
        self.name, self.result, self.dist = name, result, dist

    def load(self) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replace the entry points of the environment."""

    def replace(*entries: Entry) -> None:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: list(entries))
        registry.refresh()

    yield replace
    monkeypatch.undo()
    registry.refresh()


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (Unprintable(), "Unprintable"),
        (Hostile(), "RuntimeError: asked for __class__"),
    ],
    ids=["calls sys.exit", "an error without a text", "an object whose attributes raise"],
)
def test_a_hostile_declaration_disables_only_itself(install: Any, result: Any, reason: str) -> None:
    """R4: whatever loading one declaration does, the other ops work."""
    install(Entry("bad", result), Entry("good", spec("good")))
    assert registry.ops() == ("good",)
    assert dict(registry.failures()) == {"bad": reason}
    with pytest.raises(RuntimeError, match="disabled: " + reason):
        registry.op_spec("bad")


def test_an_interrupt_during_the_scan_is_not_swallowed(install: Any) -> None:
    """R4: Ctrl-C is no fault of a declaration; the next question scans again."""
    install(Entry("bad", KeyboardInterrupt()), Entry("good", spec("good")))
    with pytest.raises(KeyboardInterrupt):
        registry.ops()
    install(Entry("good", spec("good")))
    assert registry.ops() == ("good",)


def test_entry_points_without_metadata_are_no_distribution(install: Any) -> None:
    """R5: an interrupted uninstall leaves a folder without name and version; the conflict is still reported."""
    remains = SimpleNamespace(name=None, version=None, requires=None)
    whole = SimpleNamespace(name="cake-good", version="1.0", requires=None)
    install(Entry("good", spec("good"), remains), Entry("good", spec("good"), whole), Entry("other", spec("other")))
    assert registry.ops() == ("other",)
    assert registry.failures()["good"].startswith("an unknown distribution and cake-good 1.0 both declare it")


def test_a_mapping_is_refused_as_the_trainers_arguments() -> None:
    """R11: it has none of the attributes, so a conflict in it would pass unseen and no variant would be written."""
    with registry.override({"toy": spec("toy")}):
        values = {"toy_backend": "cake", "deterministic_mode": True, "cake_toy_variant": "fast"}
        with pytest.raises(TypeError, match="validate_args: args is a mapping"):
            hooks.validate_args(values)
        with pytest.raises(ValueError, match="--deterministic-mode is on"):
            hooks.validate_args(SimpleNamespace(**values))


def test_an_int_beyond_the_largest_float_is_not_finite() -> None:
    """A ValueError of the argument, not an OverflowError of the conversion."""
    with pytest.raises(ValueError, match="f: eps is inf; needs a finite number"):
        check_float(10**400, "eps", entry="f")


@pytest.mark.parametrize("value", [None, "~/kernels"])
def test_a_user_without_a_home_is_told_to_set_the_cache_folder(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container runs under a user id that the password file does not know."""
    for name in ("HOME", "XDG_CACHE_HOME", "CAKE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv("CAKE_CACHE_DIR", value)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(RuntimeError, match=r"the cache folder is '~.* without a home .*\(set CAKE_CACHE_DIR\)"):
        env.cache_root()
    monkeypatch.setenv("CAKE_CACHE_DIR", "/kernels")
    assert env.cache_root() == Path("/kernels")


def test_a_cache_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R33: a folder of another user; the answer names the cache and the variable, as for one that is not writable."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path))

    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(RuntimeError, match=r"the cache folder is .*Permission denied.*set CAKE_CACHE_DIR"):
        compiler.is_built(tmp_path / "pkg" / "sm_80" / "a-0" / "a.so")


def test_a_missing_tmpdir_does_not_hide_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R25: nvcc refuses a dry run then, although builds have a temporary folder of their own."""
    fake = FakeToolchain(tmp_path / "toolkit")
    inner = fake.nvcc.rename(fake.nvcc.with_name("inner"))
    fake.nvcc.write_text(f'#!/bin/sh\n[ -d "${{TMPDIR:-/}}" ] || {{ echo no TMPDIR; exit 1; }}\nexec {inner} "$@"\n')
    fake.nvcc.chmod(0o755)
    monkeypatch.setenv("CAKE_NVCC", str(fake.nvcc))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    toolchain.forget()
    assert toolchain.find_toolchain().nvcc == fake.nvcc
    toolchain.forget()


def test_the_list_of_tried_compilers_says_what_they_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R25: "ended with 1" alone does not tell which part of the environment is wrong."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho nvcc fatal : no host compiler >&2\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CAKE_NVCC", str(nvcc))
    toolchain.forget()
    with pytest.raises(RuntimeError, match="--version ended with 1, nvcc fatal : no host compiler"):
        toolchain.find_toolchain()
    toolchain.forget()


LOCKS = [(registry, "_lock"), (config, "_lock"), (lifecycle, "_lock"), (build, "_forbid_lock"), (workspace, "_lock")]


def test_a_child_forked_while_other_threads_hold_the_locks_works(tmp_path: Path) -> None:
    """R32: the holders do not exist in the child, which would wait for them for ever."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        locks = [getattr(module, name) for module, name in LOCKS]
        for lock in locks:
            lock.acquire()
        held.set()
        done.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        free = [getattr(module, name).acquire(timeout=2) for module, name in LOCKS]
        os._exit(0 if all(free) else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sys.modules["cake_core.registry"] is registry
