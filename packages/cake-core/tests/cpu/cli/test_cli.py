"""The ``cake`` command as a whole: start-up, errors, exit codes, output forms, and ``cake ops``."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cake_core import cli, registry, spec
from cake_core.cli.output import Output

if TYPE_CHECKING:
    from .conftest import Toy

COMMANDS = ("ops", "doctor", "prebuild", "verify", "bench", "manifest", "cache")
HEAVY = ("torch", "tvm_ffi", "numpy", "rich")


class Terminal(io.StringIO):
    """A stream that claims to be one."""

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """What was written, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], None]:
    """Replaces what ``cake ops`` runs."""

    def install(run: Callable[..., int]) -> None:
        module = types.ModuleType("cake_core.cli.ops")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cake_core.cli.ops", module)

    return install


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_and_plain(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: --json and --plain are options of every command."""
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert "--plain" in text


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """R89: a command line that does nothing does not succeed."""
    assert cli.main([]) == 2
    text = capsys.readouterr().err
    assert [name for name in COMMANDS if f"\n    {name} " not in text] == []


@pytest.mark.parametrize(
    "argv",
    [
        ["nothing"],
        ["ops", "--colour"],
        ["ops", "rmsnorm"],
        ["prebuild", "-j", "0"],
        ["prebuild", "-j", "two"],
        ["verify", "--seed", "x"],
        ["verify", "--variant", "slow"],
        ["bench"],
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """R89: usage errors are one line on stderr."""
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cake: ")
    assert captured.err.count("\n") == 1
    assert ") (" not in captured.err


@pytest.mark.parametrize("kind", [ValueError, TypeError, RuntimeError, NotImplementedError, OSError])
def test_an_expected_error_is_one_line_without_traceback(
    kind: type[Exception], command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: whatever the message holds, stderr gets one line, and the exit code is 1."""

    def run(args: object, out: Output) -> int:
        raise kind("cake: first line\n  second line")

    command(run)
    assert cli.main(["ops"]) == 1
    assert capsys.readouterr() == ("", "cake: first line second line\n")


def test_an_expected_error_is_a_document_with_json(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: a reader of --json gets one document in the failure case too."""

    def run(args: object, out: Output) -> int:
        raise ValueError("no such thing")

    command(run)
    assert cli.main(["ops", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": "no such thing", "kind": "ValueError"}
    assert captured.err == "cake: no such thing\n"


def test_a_fault_of_the_program_keeps_its_traceback(command: Callable[..., None]) -> None:
    """R89: what nobody expects must not look like a user's mistake."""

    def run(args: object, out: Output) -> int:
        raise KeyError("x")

    command(run)
    with pytest.raises(KeyError):
        cli.main(["ops"])


def test_cake_log_debug_shows_where_an_expected_error_came_from(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R89: the one line can be opened up."""

    def run(args: object, out: Output) -> int:
        raise ValueError("no such thing")

    command(run)
    monkeypatch.setenv("CAKE_LOG", "debug")
    assert cli.main(["ops"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """R89: Ctrl-C is no traceback."""

    def run(args: object, out: Output) -> int:
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["ops"]) == 130
    assert capsys.readouterr().err == "cake: interrupted\n"


def test_torchs_numpy_warning_is_filtered_and_others_are_not(command: Callable[..., None]) -> None:
    """R89: stderr is for what the user can act on."""

    def run(args: object, out: Output) -> int:
        warnings.warn("Failed to initialize NumPy: No module named 'numpy' (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return 0

    command(run)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert cli.main(["ops"]) == 0
    assert [str(warning.message) for warning in seen] == ["something else"]


def test_a_reader_that_leaves_early_is_no_error_message(toy: Toy) -> None:
    """R89: `cake ops | head -0` neither hangs nor prints a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    child = toy.process("ops", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert child.communicate(timeout=60)[1] == ""
    assert child.returncode == 1


# ------------------------------------------------------------------------------------------------------ cake ops


def test_ops_describes_an_installed_op(toy: Toy) -> None:
    """R89: one document with what the op declares; the architectures come from its build.json."""
    toy.write_manifest(archs=("sm_90a", "sm_100a", "sm_80"))
    done = toy.command("ops", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (op,) = [op for op in json.loads(done.stdout)["ops"] if op["op"] == "toy"]
    assert (op["distribution"], op["version"]) == ("cake-toy", "1.2.3")
    assert op["variants"] == ["det", "fast"]
    assert op["selected_by"] == [["toy_backend", "cake"]]
    assert op["backends"] == ["cpu", "sm_80", "sm_90a", "sm_100a"]
    assert [flag["option"] for flag in op["flags"]] == ["--cake-toy-check", "--cake-toy-secret"]
    assert op["prebuild_params"] == [{"name": "width", "kind": "int", "required": True, "default": None}]


def test_ops_in_plain_text_hides_hidden_flags(toy: Toy) -> None:
    """R89: a row per op with selector, visible flags and backends."""
    toy.write_manifest(archs=("sm_90a",))
    done = toy.command("ops")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("toy")]
    columns = [column.strip() for column in line.split("  ") if column]
    assert columns == [
        "toy",
        "cake-toy 1.2.3",
        "det, fast",
        "--toy-backend cake",
        "--cake-toy-variant, --cake-toy-check",
        "width",
        "cpu, sm_90a",
    ]


def test_ops_fails_for_a_broken_declaration_and_lists_the_others(toy: Toy) -> None:
    """R4, R89: exit code 1, the reason on the line of the op."""
    toy.write_manifest()
    toy.add_entry_point("sour", "cake_sour.op:OP")
    done = toy.command("ops")
    assert done.returncode == 1
    assert any(line.startswith("toy ") for line in done.stdout.splitlines())
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("sour")]
    assert line == "sour: broken declaration: ModuleNotFoundError: No module named 'cake_sour'"
    assert "Traceback" not in done.stdout + done.stderr


def test_ops_fails_for_a_broken_manifest(toy: Toy) -> None:
    """R27, R89: a build.json that cannot be read is named."""
    toy.write("kernels/build.json", "{}")
    done = toy.command("ops", "--json")
    assert done.returncode == 1
    (op,) = [op for op in json.loads(done.stdout)["ops"] if op["op"] == "toy"]
    assert "build.json" in op["error"]
    assert op["backends"] == ["cpu"]


def test_ops_says_what_to_install_when_nothing_is(capsys: pytest.CaptureFixture[str]) -> None:
    """R89: an empty table is no answer."""
    with registry.override({}):
        assert cli.main(["ops"]) == 0
    assert "cake-norms" in capsys.readouterr().out


def test_ops_of_an_op_without_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """R89: an op that is on no distribution and has one variant has no variant flag and the CPU backend."""
    plain = spec.OpSpec(
        name="plain", variants=("det",), selected_by=(("plain", "cake"),), impl="cake_plain.api", entry_points=("f",)
    )
    with registry.override({"plain": plain}):
        assert cli.main(["ops"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["plain", "-", "det", "--plain", "cake", *"--", "cpu"]


@pytest.mark.parametrize("argv", [["ops"], ["ops", "--json"], ["manifest", "--check"], ["cache"]], ids=" ".join)
def test_a_piped_command_imports_nothing_heavy(argv: list[str], toy: Toy) -> None:
    """R88: torch-free, and rich stays out of a pipe."""
    toy.write_manifest()
    code = (
        f"import sys; from cake_core.cli import main; code = main({argv!r})\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules], code)"
    )
    done = toy.python("-c", code)
    assert done.stdout.splitlines()[-1] == "HEAVY [] 0"


def test_a_terminal_gets_a_rich_table_without_torch(toy: Toy) -> None:
    """R88: rich draws on a terminal; --plain, --json and NO_COLOR are honoured."""
    toy.write_manifest()
    assert "\x1b[" in toy.terminal("ops")
    assert "\x1b[" not in toy.terminal("ops", "--plain")
    assert json.loads(toy.terminal("ops", "--json"))["broken"] == []
    green_ok = "\x1b[32mok"
    assert green_ok in toy.terminal("manifest", "--check", "cake_toy")
    assert green_ok not in toy.terminal("manifest", "--check", "cake_toy", env={"NO_COLOR": "1"})


def processor_seconds(run: Callable[[], object]) -> float:
    """Of the children that ``run`` waits for. Other work on the machine adds little to it, unlike to wall time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(("terminal", "limit_ms"), [(False, 150), (True, 250)])
def test_ops_starts_quickly(terminal: bool, limit_ms: int, toy: Toy) -> None:
    """R88: median of 5; on a slow or busy machine the limit grows with what importing the standard library takes."""
    toy.write_manifest()
    run = toy.terminal if terminal else toy.command
    run("ops")  # compiles the bytecode
    times, library = [], []
    for _ in range(5):
        library.append(processor_seconds(lambda: toy.python("-c", "import importlib.metadata, argparse, dataclasses")))
        times.append(processor_seconds(lambda: run("ops")))
    slowness = max(statistics.median(library) / 0.050, 1.0)
    assert statistics.median(times) * 1e3 <= limit_ms * slowness, (times, library)


# -------------------------------------------------------------------------------------------------------- output


def test_plain_tables_are_aligned_without_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    """R88: columns are as wide as their widest cell."""
    Output().table(("op", "status"), [("a", "ok"), ("longer", "failed")])
    assert capsys.readouterr().out == "op      status\na       ok\nlonger  failed\n"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Output, Terminal]]:
    """An output on a terminal of so many columns, and that terminal."""

    def make(columns: int) -> tuple[Output, Terminal]:
        stdout = Terminal()
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        return Output(), stdout

    return make


ROWS = [("gated_rmsnorm", "/a/path/of/many/folders/that/ends/somewhere", "1.234e-3", "ok")]


@pytest.mark.parametrize("columns", range(20, 90, 7))
def test_a_table_on_a_terminal_cuts_nothing(columns: int, screen: Callable[[int], tuple[Output, Terminal]]) -> None:
    """R88: whatever its width; text that may continue on the next line loses no character."""
    out, stdout = screen(columns)
    out.table(("op", "path", "error", "status"), ROWS, fold=("path",))
    text = stdout.text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns
    for cell in ("gated_rmsnorm", "1.234e-3", "ok"):
        assert cell in text
    assert text.count("/") == ROWS[0][1].count("/")


def test_a_table_that_does_not_fit_becomes_blocks(screen: Callable[[int], tuple[Output, Terminal]]) -> None:
    """R88: a block per row, named by its first cell."""
    out, stdout = screen(50)
    out.table(("op", "path", "error", "status"), ROWS)
    assert [line.rstrip() for line in stdout.text().splitlines()] == [
        "gated_rmsnorm",
        "  path    /a/path/of/many/folders/that/ends/somewh",
        "          ere",
        "  error   1.234e-3",
        "  status  ok",
    ]


def test_a_line_on_a_terminal_is_not_broken(screen: Callable[[int], tuple[Output, Terminal]]) -> None:
    """R88: a command that is copied from it works."""
    out, stdout = screen(20)
    out.line("pip install 'something with a long name'")
    assert stdout.text() == "pip install 'something with a long name'\n"


def test_json_drops_text_and_keeps_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    """R89: stdout holds exactly one document; progress lines go to stderr."""
    out = Output(json=True)
    out.line("text")
    out.table(("a",), [("b",)])
    with out.progress("work") as progress:
        progress.log("built x")
        progress.update("y", done=1, total=2)
    out.document({"rows": []})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"rows": []}
    assert captured.err == "built x\n"


def test_progress_lines_go_to_stdout_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """R88: plain lines, no bar and no rich."""
    with Output().progress("work", total=2) as progress:
        progress.update("x", done=1)
        progress.log("built x")
    assert capsys.readouterr() == ("built x\n", "")


def test_a_terminal_shows_a_progress_bar_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """R88: with what is being done and how far it is."""
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with Output().progress("work", total=2) as progress:
        progress.update("now toy_fwd", done=1)
    assert "now toy_fwd" in stderr.getvalue()
    assert "1/2" in stderr.getvalue()


def test_the_documentation_names_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    """R89: docs/cli.md and --help list the same things."""
    root = next(folder for folder in Path(__file__).parents if (folder / "docs" / "cli.md").is_file())
    text = (root / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `cake (\w+)", text, re.MULTILINE) == list(COMMANDS)
    option = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
    for name in COMMANDS:
        cli.main([name, "--help"])
    assert set(option.findall(capsys.readouterr().out)) - {"--help"} == set(option.findall(text))
