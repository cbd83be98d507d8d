"""Make a new op package from templates/op: ``uv run tools/new_op.py NAME``.

The package works as it is (a squared ReLU). docs/adding_an_op.md says how it becomes another op and what belongs where.
"""

from __future__ import annotations

import argparse
import ast
import keyword
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "templates" / "op"
# What is run in a new package, in this order, and what it is for; docs/adding_an_op.md has the same list.
STEPS = (
    ("uv sync", "install it"),
    ("uv run tools/pins.py", "constraints.txt names the package as a user of its pins"),
    ("uv run ruff format packages/{dist}", "lines have another length now"),
    ("uv run ruff check --fix packages/{dist}", "nothing to fix before you change the code"),
    ("uv run cake manifest {dist}", "kernels/libraries.toml -> kernels/build.json"),
    ("uv run pytest packages/{dist}", "its own tests"),
    ("uv run cake verify {name}", "forward and backward against the FP64 oracle, on the CPU"),
    ('uv run pytest packages/cake-core -k "contract and {name}"', "the op contract"),
)


def distribution(name: str) -> str:
    """The distribution of the op, ``cake-gated-rmsnorm`` for gated_rmsnorm."""
    return "cake-" + name.replace("_", "-")


def check_name(name: str, root: Path | None = None) -> None:
    """Raises: ValueError for a name that is no op name, that Python or the package needs, or that exists."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ValueError(f"NAME is {name!r}; needs lower-case letters, digits and single underscores, a letter first")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in template_names():
        raise ValueError(f"NAME is {name!r}; needs a name that is no keyword and that templates/op does not use itself")
    root = root or ROOT
    for package in sorted((root / "packages").glob("*/pyproject.toml")):
        project = tomllib.loads(package.read_text())["project"]
        taken = {project["name"], *project.get("entry-points", {}).get("cake.ops", {})}
        if taken & {name, distribution(name)}:
            raise ValueError(f"NAME is {name!r}; needs a new name ({package.parent.name} has it)")
    if (root / "packages" / distribution(name)).exists():
        raise ValueError(f"NAME is {name!r}; needs a new name (packages/{distribution(name)} exists)")


def fill(text: str, name: str) -> str:
    """``text`` of the template, or a file name of it, for the op ``name``."""
    return text.replace("__op__", name).replace("__dist__", name.replace("_", "-"))


def template_files(template: Path = TEMPLATE) -> Iterator[Path]:
    """The files of the template, without what running it leaves behind."""
    left_behind = {"__pycache__", ".pytest_cache", ".ruff_cache", "build.json"}
    for file in sorted(template.rglob("*")):
        if file.is_file() and not left_behind.intersection(file.relative_to(template).parts):
            yield file


def template_names() -> set[str]:
    """Names of the template's files and in its Python code: an op called ``plan`` or ``torch`` would hide them."""
    names: set[str] = set()
    for file in template_files():
        names |= {file.stem, *file.relative_to(TEMPLATE).parent.parts}
        if file.suffix == ".py":
            for node in ast.walk(ast.parse(file.read_text())):
                # The attributes that hold a name, of a variable, an argument, an import or a definition.
                names |= {str(vars(node)[key]) for key in ("id", "arg", "name", "asname") if vars(node).get(key)}
    return names


def create(name: str, folder: Path) -> None:
    """Copy the template to ``folder``, which must not exist, and fill the name in."""
    folder.mkdir(parents=True)
    for file in template_files():
        target = folder / fill(file.relative_to(TEMPLATE).as_posix(), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(fill(file.read_text(), name))
        shutil.copymode(file, target)


def register(pyproject: str, name: str) -> str:
    """The root pyproject.toml with the new package in the dev group and among the sources.

    Raises: ValueError when the text has no line to put them after, or ``packages/*`` is no workspace member.
    """
    if "packages/*" not in tomllib.loads(pyproject)["tool"]["uv"]["workspace"]["members"]:
        raise ValueError("the root pyproject.toml does not have packages/* among its workspace members")
    dist = distribution(name)
    for pattern, line in (
        (r'^dev = \[\n(?:  "cake-[^\n]*\n)+', f'  "{dist}",\n'),
        (r"^\[tool\.uv\.sources\]\n(?:cake-[^\n]*\n)+", f"{dist} = {{ workspace = true }}\n"),
    ):
        found = re.search(pattern, pyproject, re.MULTILINE)
        if found is None:
            raise ValueError(f"the root pyproject.toml has no lines that match {pattern!r}")
        pyproject = pyproject[: found.end()] + line + pyproject[found.end() :]
    return pyproject


def next_steps(name: str) -> list[str]:
    """One line for each of ``STEPS``, with the hints in one column."""
    commands = [command.format(name=name, dist=distribution(name)) for command, _ in STEPS]
    width = max(map(len, commands))
    return [f"{command:<{width}}  # {hint}" for command, (_, hint) in zip(commands, STEPS, strict=True)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help="name of the op: lower case, such as swiglu or token_shift")
    name = parser.parse_args(argv).name
    pyproject = ROOT / "pyproject.toml"
    try:
        check_name(name)
        registered = register(pyproject.read_text(), name)
    except ValueError as error:
        print(f"new_op: {error}", file=sys.stderr)
        return 1
    create(name, ROOT / "packages" / distribution(name))
    pyproject.write_text(registered)
    print(f"packages/{distribution(name)} is made and part of the workspace. Next:", "", sep="\n")
    print(*next_steps(name), sep="\n")
    print("", "Then make it your op: docs/adding_an_op.md.", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
