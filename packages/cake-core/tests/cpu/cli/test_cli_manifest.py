"""``cake manifest``: writes and checks build.json of the installed ops."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from cake_core import cli, registry

if TYPE_CHECKING:
    from .conftest import Toy


def test_check_passes_when_nothing_changed(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R87: exit code 0, one row per package."""
    assert cli.main(["manifest", "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "packages": [{"package": "cake_toy", "status": "ok", "differences": []}]
    }


def test_check_says_what_differs_and_writes_nothing(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R87: one byte of a source is a difference; the libraries made from it are named."""
    built = installed.folder / "kernels" / "build.json"
    before = built.read_bytes()
    installed.write("kernels/csrc/toy_bwd.cu", "// changed\n")
    assert cli.main(["manifest", "--check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "cake_toy: library toy_bwd_sm_90a differs" in lines
    assert not [line for line in lines if "toy_fwd" in line]
    assert built.read_bytes() == before


def test_without_check_the_file_is_written_once(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R87: then it is up to date."""
    installed.write("kernels/csrc/toy_bwd.cu", "// changed\n")
    assert cli.main(["manifest"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["cake_toy", "written"]
    assert cli.main(["manifest"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["cake_toy", "ok"]
    assert cli.main(["manifest", "--check"]) == 0


@pytest.mark.parametrize("name", ["cake_toy", "cake-toy", "Toy-kernels"])
def test_a_package_is_named_by_import_or_distribution_name(name: str, toy: Toy) -> None:
    """R87: an installed distribution, in a child process."""
    toy.write_manifest()
    if name == "Toy-kernels":
        toy.write("../cake_toy-1.2.3.dist-info/METADATA", "Metadata-Version: 2.1\nName: Toy-kernels\nVersion: 1.2.3\n")
    done = toy.command("manifest", "--check", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()[1:]] == [["cake_toy", "ok"]]
    (toy.folder / "kernels" / "build.json").unlink()
    done = toy.command("manifest", "--check", name)
    assert done.returncode == 1
    assert "cake_toy: build.json is missing" in done.stdout


def test_an_unknown_package_is_refused(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: one line that names the known ones."""
    assert cli.main(["manifest", "cake_tay"]) == 1
    assert capsys.readouterr().err == (
        "cake: manifest: PACKAGE is 'cake_tay'; did you mean 'cake_toy'?; needs one of cake_toy\n"
    )


def test_a_wrong_libraries_toml_is_one_line(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: file and field, no traceback."""
    installed.write("kernels/libraries.toml", "package = 'cake_toy'\n")
    assert cli.main(["manifest"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "libraries.toml: " in error
    assert "program is None" in error


def test_a_broken_declaration_fails_the_check(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R4, R87: a check that cannot see an op does not pass."""
    with registry.override({"sour": registry.op_spec("toy")}):
        assert cli.main(["manifest", "--check"]) == 1
    assert "the declaration of op 'sour' is broken" in capsys.readouterr().err
