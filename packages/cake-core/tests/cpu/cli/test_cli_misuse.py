"""The ``cake`` command in places where nobody tried it: closed streams, narrow encodings, folders of somebody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cake_core import cli
from cake_core.cli import doctor

if TYPE_CHECKING:
    from .conftest import Toy

KEY = "0123456789abcdef01234567"


def shell(redirect: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """``python -m cake_core.cli ARGV`` with a redirection of the shell."""
    words = " ".join((sys.executable, "-m", "cake_core.cli", *argv, redirect))
    return subprocess.run(["sh", "-c", words], env={**os.environ, **environment}, capture_output=True, check=False)


def test_a_closed_stdout_drops_the_result_and_nothing_else(tmp_path: Path) -> None:
    """R89: a service manager starts programs so."""
    done = shell(">&-", "cache", CAKE_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_stderr_keeps_the_exit_code(tmp_path: Path) -> None:
    """R89: a failure still ends with 1."""
    done = shell("2>&-", "cache", "prune", "--older-than", "x", CAKE_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_path_that_the_encoding_cannot_write_is_escaped(tmp_path: Path) -> None:
    """R89: the command did its work; a letter is no reason to fail."""
    done = shell("", "cache", CAKE_CACHE_DIR=str(tmp_path / "caché"), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"cach\xe9: 0 libraries" in done.stdout


def test_prune_leaves_what_only_looks_like_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R89: a cache folder may be pointed at a folder with other files; their names may hold a digest."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "photos" / "2024"
    folder.mkdir(parents=True)
    (folder / f"party-{KEY}.jpg").touch()
    (folder / f"clone-{KEY}89abcdef").mkdir()
    (folder / f"old-{KEY}.tmp-notes").touch()
    (folder / f"toy-{KEY}.tmp-12-89abcdef").mkdir()
    (folder / f"toy-{KEY}.log").touch()
    assert cli.main(["cache", "prune", "--older-than", "0m"]) == 0
    assert {path.name for path in folder.iterdir()} == {
        f"party-{KEY}.jpg",
        f"clone-{KEY}89abcdef",
        f"old-{KEY}.tmp-notes",
    }


def test_doctor_without_a_home_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """R89: the command that is asked when something is wrong answers then, too."""
    for name in ("HOME", "XDG_CACHE_HOME", "CAKE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    check = doctor._cache()
    assert (check.status, check.fix) == ("warning", "set CAKE_CACHE_DIR to a folder of yours")
    assert "without a home folder" in check.found


def test_doctor_counts_around_files_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R89: a build publishes while the report is made; a link may lead nowhere."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path))
    (tmp_path / "whole").write_bytes(b"x" * 2_000_000)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert doctor._cache().found == f"{tmp_path}, 2.0 MB"


@pytest.mark.parametrize("flag", ["--json", "--plot"])
@pytest.mark.parametrize("name", ["", "file/x.svg", "folder.svg"])
def test_bench_refuses_an_unwritable_result_before_it_measures(
    flag: str,
    name: str,
    installed: Toy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """R89: the measurement takes minutes and its result would be lost."""
    pytest.importorskip("torch")
    monkeypatch.setattr("cake_core.bench.run_bench", lambda *_, **__: pytest.fail("it measured"))
    (tmp_path / "file").touch()
    (tmp_path / "folder.svg").mkdir()
    target = str(tmp_path / name) if name else ""
    assert cli.main(["bench", "toy", "--device", "cpu", flag, target]) == 1
    assert f"bench: {flag} is {target!r}" in capsys.readouterr().err
