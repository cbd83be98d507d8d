"""README.md and docs/design.md name what there is: variables, public names, modules, other pages."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import cake_core
import pytest
from cake_core import env

ROOT = next((folder for folder in Path(__file__).parents if (folder / "docs" / "cli.md").is_file()), Path())
README, DESIGN = ROOT / "README.md", ROOT / "docs" / "design.md"


def test_the_readme_lists_every_environment_variable() -> None:
    """What env.py names is what the project reads."""
    read = set(re.findall(r'"([A-Z][A-Z_]{3,})"', Path(str(env.__file__)).read_text()))
    read -= {"NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "LC_ALL"}  # hidden from, or given to compilers
    rows = re.findall(r"^\| ((?:`[A-Z_]+`(?:, )?)+) \|", README.read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"[A-Z_]+", row)} == read


def test_every_public_name_of_the_readme_exists() -> None:
    """The first column of its tables."""
    first_cells = [line.split("|")[1] for line in README.read_text().splitlines() if line.startswith("| `cake_core.")]
    names = [name for cell in first_cells for name in re.findall(r"`(cake_core[\w.]*)(?:\(.*?\))?`", cell)]
    assert len(names) > 30
    for name in names:
        found: object = cake_core
        for part in name.split(".")[1:]:
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")  # type: ignore[attr-defined]
            found = getattr(found, part)


def test_the_design_note_places_every_module() -> None:
    """A new module has to be put somewhere."""
    table = DESIGN.read_text().partition("| part | modules |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert named == {module.name for module in pkgutil.iter_modules(cake_core.__path__)} - {"cli"}


@pytest.mark.parametrize("page", [README, DESIGN, ROOT / "docs" / "cli.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Links out of the package count where it lies in the repository."""
    in_repository = ROOT.parent.name == "packages"
    for target in re.findall(r"\]\(([^):#]+)\)", page.read_text()):
        if in_repository or ROOT in (page.parent / target).resolve().parents:
            assert (page.parent / target).exists(), f"{page.name} links {target}"
