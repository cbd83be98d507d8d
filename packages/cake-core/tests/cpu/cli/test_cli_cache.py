"""``cake cache``: sizes, and removal of leftovers and of old libraries."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from cake_core import cli
from cake_core.locks import try_lock

KEY = "0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; returns the folder of one package and architecture."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "cake_toy" / "sm_90a"
    folder.mkdir(parents=True)
    return folder


def library(folder: Path, name: str, *, days_old: float = 0.0, size: int = 1000) -> Path:
    """A published library with its lock file."""
    home = folder / f"{name}-{KEY}"
    home.mkdir()
    (home / f"{name}.so").write_bytes(b"x" * size)
    home.with_name(home.name + ".lock").touch()
    built = time.time() - days_old * 86400
    os.utime(home, (built, built))
    return home


def leftover(folder: Path, name: str) -> Path:
    """What a killed builder leaves: a temporary folder, a lock and the log of a failure, no library."""
    temporary = folder / f"{name}-{KEY}.tmp-1-89abcdef"
    temporary.mkdir()
    (temporary / "kernel.o").write_bytes(b"x" * 500)
    (folder / f"{name}-{KEY}.lock").touch()
    (folder / f"{name}-{KEY}.log").touch()
    return temporary


def names(folder: Path) -> set[str]:
    """What lies in a folder, without the keys."""
    return {path.name.replace(f"-{KEY}", "") for path in folder.iterdir()}


def prune(*argv: str) -> int:
    return cli.main(["cache", "prune", *argv])


def test_ls_gives_sizes_ages_and_leftovers(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: the JSON document of cake cache."""
    library(cache, "toy_fwd", days_old=3, size=2000)
    temporary = leftover(cache, "toy_bwd")
    assert cli.main(["cache", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(e["package"], e["arch"], e["library"], e["bytes"]) for e in document["libraries"]] == [
        ("cake_toy", "sm_90a", "toy_fwd", 2000)
    ]
    assert document["libraries"][0]["age_seconds"] == pytest.approx(3 * 86400, abs=60)
    assert document["bytes"] == 2500
    assert str(temporary) in document["leftovers"]


def test_ls_in_plain_text(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: one line per library and a total."""
    library(cache, "toy_fwd", days_old=3, size=2000)
    leftover(cache, "toy_bwd")
    assert cli.main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["cake_toy", "sm_90a", "toy_fwd", "2.0", "kB", "3", "d", "ago"]
    assert lines[-1].endswith("1 library, 2.5 kB, 3 leftovers (cake cache prune)")


def test_an_absent_cache_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R89: nothing compiled yet is no failure, and listing creates nothing."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "none"))
    assert cli.main(["cache"]) == 0
    assert prune() == 0
    assert not (tmp_path / "none").exists()


def test_prune_without_an_age_removes_leftovers_only(cache: Path) -> None:
    """R34: folders and locks without a library go, libraries of any age and their locks stay."""
    library(cache, "toy_fwd", days_old=1000)
    leftover(cache, "toy_bwd")
    assert prune() == 0
    assert names(cache) == {"toy_fwd", "toy_fwd.lock"}


def test_prune_removes_leftovers_beside_a_library_unless_its_lock_is_held(cache: Path) -> None:
    """R34: a discarded folder and the log of a failed rebuild; the library and its lock stay."""
    home = library(cache, "toy_fwd")
    leftover(cache, "toy_fwd")
    lock = try_lock(home.with_name(home.name + ".lock"))
    assert lock is not None
    assert prune() == 0
    lock.release()
    assert names(cache) == {"toy_fwd", "toy_fwd.lock", "toy_fwd.log", "toy_fwd.tmp-1-89abcdef"}
    assert prune() == 0
    assert names(cache) == {"toy_fwd", "toy_fwd.lock"}
    assert (home / "toy_fwd.so").exists()


def test_a_lock_alone_is_a_leftover_unless_it_is_held(cache: Path) -> None:
    """R34: a builder that has just begun has nothing but its lock."""
    path = cache / f"toy_fwd-{KEY}.lock"
    lock = try_lock(path)
    assert lock is not None
    assert prune() == 0
    assert path.exists()
    lock.release()
    assert prune() == 0
    assert names(cache) == set()


def test_prune_by_age_removes_older_libraries_with_their_locks(cache: Path) -> None:
    """R89: --older-than compares with the time of the build."""
    library(cache, "toy_old", days_old=31)
    library(cache, "toy_new", days_old=29)
    assert prune("--older-than", "30d") == 0
    assert names(cache) == {"toy_new", "toy_new.lock"}


def test_prune_leaves_what_is_being_built(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R34: while a builder holds the lock, neither its temporary folder nor the library is touched."""
    leftover(cache, "toy_bwd")
    library(cache, "toy_fwd", days_old=31)
    locks = [try_lock(cache / f"{name}-{KEY}.lock") for name in ("toy_bwd", "toy_fwd")]
    try:
        assert prune("--older-than", "1m", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {
            "root": str(cache.parents[1]),
            "removed": [],
            "bytes": 0,
            "busy": 2,
        }
    finally:
        for lock in locks:
            assert lock is not None
            lock.release()
    assert prune("--older-than", "1m") == 0
    assert names(cache) == set()


@pytest.mark.parametrize("age", ["30", "d", "-1d", "1w", "1.5d"])
def test_a_wrong_age_is_refused(age: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: one line, nothing removed."""
    library(cache, "toy_fwd", days_old=1000)
    assert prune(f"--older-than={age}") == 1
    assert capsys.readouterr().err == (
        f"cake: cache: --older-than is {age!r}; needs a number with d, h or m, such as 30d\n"
    )
    assert names(cache) == {"toy_fwd", "toy_fwd.lock"}


def test_an_age_without_prune_is_refused(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: an option that would do nothing is an error."""
    assert cli.main(["cache", "ls", "--older-than", "1d"]) == 1
    assert "needs cake cache prune" in capsys.readouterr().err
