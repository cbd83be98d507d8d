"""What the repository may hold, and what its packages declare about each other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
# Written in pieces so that this file passes its own test.
_HOSTS = (("py", "pi.org"), ("python", "hosted"), ("npm", "js."), ("deb.", "debian"), ("pytorch.org", "/whl"))
_FOLDERS = (("roo", "t"), ("wor", "k"), ("far", "m"))
HOSTS = re.compile("|".join(re.escape("".join(pieces)) for pieces in _HOSTS))
MACHINE_PATHS = re.compile(
    r"(?:(?<![\w.}$*-])|(?<=-[IL]))/(?:" + "|".join(map("".join, _FOLDERS)) + "|" + "ho" + r"me/\w+" + ")/"
)


def tracked() -> list[Path]:
    """Every file of the commit that is also on disk."""
    names = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def project(package: Path) -> dict:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def test_no_tracked_file_names_a_registry_host_or_a_machine_path() -> None:
    """R90: commits name neither where packages come from nor where anybody works."""
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if HOSTS.search(line) or MACHINE_PATHS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "pieces", [("see https://py", "pi.org/simple"), ("-I/roo", "t/include"), ("cd /wor", "k/main"), ("/ho", "me/me/x")]
)
def test_the_host_and_path_patterns_see_what_they_are_for(pieces: tuple[str, str]) -> None:
    """R90: the grep above can fail."""
    line = "".join(pieces)
    assert HOSTS.search(line) or MACHINE_PATHS.search(line)


def test_no_tracked_file_is_generated_vendored_or_large() -> None:
    """The tree holds our own words and code; locks, vendored sources and libraries are made on the user's machine."""
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        assert path.name != "uv.lock", name
        assert "/_vendor/" not in name, name
        assert path.suffix not in (".so", ".o", ".cubin", ".whl"), name
        assert path.stat().st_size <= 500_000, f"{name}: {path.stat().st_size} bytes"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_op_accepts_the_cake_core_of_the_workspace(package: Path) -> None:
    """R84: uv does not enforce ranges between workspace members."""
    core = Version(project(ROOT / "packages/cake-core")["version"])
    if package.name == "cake-core":
        return
    ranges = [
        text.removeprefix("cake-core") for text in project(package)["dependencies"] if text.startswith("cake-core")
    ]
    assert len(ranges) == 1, f"{package.name} must depend on cake-core once"
    assert core in SpecifierSet(ranges[0]), f"{package.name} needs cake-core{ranges[0]}, the workspace has {core}"
    assert ">=" in ranges[0], "the range needs a lower bound"
    assert "<" in ranges[0], "the range needs an upper bound"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_has_the_files_of_a_release(package: Path) -> None:
    """A distribution is released alone, so it carries its own papers."""
    meta = project(package)
    assert re.fullmatch(r"\d+\.\d+\.\d+", meta["version"]), "static versions, so that a change shows in a diff"
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "docs", "changes"):
        assert (package / name).exists(), f"{package.name} lacks {name}"
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (package / "src" / package.name.replace("-", "_") / "py.typed").exists()
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert package.name in root["tool"]["uv"]["sources"], f"{package.name} is not a workspace source"
    assert any(re.match(rf"{package.name}\b", text) for text in root["dependency-groups"]["dev"]), (
        f"dev lacks {package.name}"
    )


def test_no_extra_selects_a_torch_build() -> None:
    """X04: a CPU / CUDA pair of extras makes a workspace install two torch builds at once."""
    for package in PACKAGES:
        for extra, requirements in project(package).get("optional-dependencies", {}).items():
            assert not [text for text in requirements if re.match(r"(torch|triton)\b", text)], (
                f"{package.name}[{extra}]"
            )
    pins = [
        line.split()[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    ]
    assert len(pins) == 1, f"all extras together resolve to {pins}"


def test_the_pins_are_what_the_workspace_resolves_to() -> None:
    """The export of the generated lock equals constraints.txt."""
    result = subprocess.run((sys.executable, ROOT / "tools/pins.py", "--check"), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_torch_is_pinned_alike_in_the_constraints_and_in_the_pins() -> None:
    """One torch for the workspace, CI and the toolchain."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    constraint = next(text for text in root["constraint-dependencies"] if text.startswith("torch"))
    pin = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert pin is not None
    assert Version(pin[1]) in SpecifierSet(constraint.removeprefix("torch"))


def test_no_page_has_a_placeholder_left() -> None:
    """A figure that is to be filled in is not a figure."""
    for path in tracked():
        if path.suffix == ".md" and "templates" not in path.parts:
            found = re.search(r"@[A-Z]+@", path.read_text())
            assert found is None, f"{path.relative_to(ROOT)}: {found}"
