"""``cake verify``: what it accepts, what it refuses, and that it leaves the process as it was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from cake_core import cli, config, registry
from cake_core.cli import verify as verify_command
from cake_core.testing.synthetic_op.op import OP as SYNTHETIC

if TYPE_CHECKING:
    from .conftest import Toy

pytest.importorskip("torch")


def verify(*argv: str) -> int:
    return cli.main(["verify", "--device", "cpu", *argv])


def rows(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """(pass, variant) -> row of the JSON document."""
    return {(row["pass"], row["variant"]): row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_a_right_op_passes_in_every_pass_and_variant(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89, R91: one row per pass and variant over all shapes, empty ones included."""
    assert verify("--json") == 0
    found = rows(capsys)
    assert set(found) == {(run, variant) for run in ("fwd", "bwd") for variant in ("det", "fast")}
    assert {row["status"] for row in found.values()} == {"ok"}
    assert {row["shapes"] for row in found.values()} == {3}


def test_the_table_has_worst_output_error_budget_and_bits(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: plain text ends with one summary line."""
    installed.write("api.py", "def double(x):\n    return x * 2 * (1 + 3e-6)\n")
    assert verify("toy") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [*"op pass variant worst output error budget bits status".split()]  # noqa: SIM905
    forward = [line for line in lines if line.startswith("toy  fwd   det")]
    assert len(forward) == 1
    cells = forward[0].split()
    assert cells[:4] == ["toy", "fwd", "det", "y"]
    assert float(cells[4]) == pytest.approx(3e-6, rel=0.1)
    assert cells[5:7] == ["1.0e-5", "3x"]
    assert len(cells[7]) == 8
    assert cells[8] == "ok"
    assert lines[-1].startswith("1 op, 3 shapes on cpu: 4 rows ok in ")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (1.74e-3, "1.7e-3"), (2.0, "2.0e0"), (float("nan"), "nan"), (float("inf"), "inf")],
)
def test_an_error_is_written_without_idle_digits(value: float | None, text: str) -> None:
    """R89: the table fits on 80 columns."""
    assert verify_command._number(value) == text


def test_progress_counts_shapes_times_variants(installed: Toy, progress: list[tuple[Any, ...]]) -> None:
    """R89: the total is known before the first case runs, and each case is named when it starts."""
    assert verify("toy") == 0
    cases = [("small", "det"), ("small", "fast"), ("odd", "det"), ("odd", "fast"), ("empty", "det"), ("empty", "fast")]
    assert [call for call in progress if call[2] is not None] == [
        (f"toy {shape} {variant}", done, 6) for done, (shape, variant) in enumerate(cases)
    ]


def test_a_scale_error_of_two_percent_fails(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R91: exit code 1; only the rows of the wrong pass fail, and the error is a figure."""
    installed.write("api.py", "def double(x):\n    return x * 2.04\n")
    assert verify("--json") == 1
    found = rows(capsys)
    assert {key: row["status"] for key, row in found.items()} == {
        ("fwd", "det"): "failed",
        ("bwd", "det"): "ok",
        ("fwd", "fast"): "failed",
        ("bwd", "fast"): "ok",
    }
    assert found["fwd", "det"]["error"] == pytest.approx(0.02, rel=0.01)
    assert "over the budget" in found["fwd", "det"]["problems"][0]


def test_a_budget_that_would_accept_two_percent_fails(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R91: an op cannot pass by a wide budget."""
    installed.write(
        "testing/budgets.py",
        "from cake_core.testing.case import Budget\nBUDGETS = {'y': Budget(0.03), 'dx': Budget(1e-5)}\n",
    )
    assert verify("--json") == 1
    assert "would accept a scale" in rows(capsys)["fwd", "det"]["problems"][0]


@pytest.mark.parametrize(("budget", "code"), [("1.1e-3", 0), ("1e-4", 1)])
def test_a_case_may_have_a_tighter_budget(
    budget: str, code: int, installed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """R91: a backend that is better than the op has to be is held to what it is."""
    routes = (installed.folder / "testing/routes.py").read_text()
    routes = routes.replace("import Case", "import Budget, Case")
    routes = routes.replace("traffic=", f"budgets={{'y': Budget({budget})}}, traffic=")
    installed.write("testing/routes.py", routes)
    installed.write(
        "testing/budgets.py",
        "from cake_core.testing.case import Budget\nBUDGETS = {'y': Budget(5e-3), 'dx': Budget(1e-5)}\n",
    )
    installed.write("api.py", "def double(x):\n    return x * 2.002\n")
    assert verify("--json") == code
    found = rows(capsys)
    assert found["fwd", "det"]["budget"] == float(budget)
    assert found["bwd", "det"]["budget"] == 1e-5


@pytest.mark.parametrize(("factor", "code"), [("1", 0), ("(1 + 2**-9)", 1)])
def test_few_elements_may_have_the_error_of_their_rounding(
    factor: str, code: int, installed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """R91: a correctly rounded BF16 output passes and the row shows what it was held to; a quarter ulp more fails."""
    installed.write(
        "testing/budgets.py",
        "from cake_core.testing.case import Budget\nBUDGETS = {'y': Budget(1.6e-3), 'dx': Budget(1e-5)}\n",
    )
    installed.write("api.py", f"def double(x):\n    return (x * 2 * {factor}).bfloat16()\n")
    assert verify("--json") == code
    row = rows(capsys)["fwd", "det"]
    assert row["error"] > 1.6e-3
    assert (row["error"] < row["budget"] < 1.02 * 2.0**-8) == (code == 0)


def test_nan_fails_and_the_document_stays_json(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89, R91: NaN in any shape is the worst error of all, and JSON has no NaN."""
    installed.write("api.py", "def double(x):\n    return x * (float('nan') if x.numel() == 7 else 2)\n")
    assert verify("--json") == 1
    text = capsys.readouterr().out
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["failed"] == 2
    assert {row["error"] for row in document["rows"] if row["pass"] == "fwd"} == {"nan"}


def test_a_wrong_shape_fails(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R91: an output that broadcasts to the definition is still wrong."""
    installed.write("api.py", "def double(x):\n    return (x * 2)[None]\n")
    assert verify("--json") == 1
    assert "shape" in rows(capsys)["fwd", "det"]["problems"][0]


def test_det_that_changes_a_bit_between_runs_fails(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R92: three runs, compared by their bytes; fast promises no bits and passes."""
    installed.write(
        "api.py",
        "import torch\ncalls = 0\ndef double(x):\n    global calls\n    calls += 1\n    y = x * 2\n"
        "    return torch.nextafter(y, y + 1) if calls % 3 == 0 else y\n",
    )
    assert verify() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("toy  fwd")] == [["differ", "failed"], ["-", "ok"]]
    assert "toy fwd det: small: 3 runs of det did not give the same bits" in lines


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(
    installed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """R92: the digest in the table identifies operands and results."""

    def digest(seed: str) -> str:
        assert verify("--variant", "det", "--seed", seed, "--json") == 0
        return rows(capsys)["fwd", "det"]["sha256"]

    assert digest("1") == digest("1") != digest("2")


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("testing/routes.py", "import nowhere_to_be_found\n", "ModuleNotFoundError: No module named"),
        (
            "testing/shapes.py",
            "BENCH = {}\n",
            "AttributeError: module 'cake_toy.testing.shapes' has no attribute 'VERIFY'",
        ),
        ("testing/shapes.py", "VERIFY = {}\n", "ValueError: cake_toy.testing: shapes.VERIFY is empty"),
        ("testing/budgets.py", "1 / 0\n", "ZeroDivisionError"),
    ],
)
def test_a_broken_testing_package_is_a_failing_row(
    file: str, text: str, reason: str, installed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: no traceback, and the ops after it are verified."""
    installed.write(file, text)
    with registry.override({"toy": registry.op_spec("toy"), "synthetic": SYNTHETIC}):
        assert verify("toy", "synthetic", "--variant", "det") == 1
    captured = capsys.readouterr()
    status = {line.split()[0]: line.split()[-1] for line in captured.out.splitlines()[1:5]}
    assert status == {"toy": "failed", "synthetic": "ok"}
    assert f"toy - -: its testing package does not load: {reason}" in captured.out
    assert "Traceback" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("replace", "by", "reason"),
    [
        ('return {"y": api.double(x)}', "raise RuntimeError('no kernel')", "small: RuntimeError: no kernel"),
        ('return {"y": x.double() * 2,', "return {", "small: output 'y' has no definition"),
        ('"y": api.double(x)', '"y": api.double(x), "z": x', "small: output 'z' has no definition"),
        (
            "x = torch.randn(n, generator=generator).to(device)",
            "raise MemoryError('too large')",
            "small: the case cannot be made: MemoryError",
        ),
    ],
)
def test_what_an_op_raises_or_leaves_out_is_a_failing_row(
    replace: str, by: str, reason: str, installed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: whatever an op raises is reported with its shape."""
    routes = (installed.folder / "testing/routes.py").read_text()
    assert replace in routes
    installed.write("testing/routes.py", routes.replace(replace, by))
    assert verify("--variant", "det") == 1
    assert reason in capsys.readouterr().out


def test_an_output_without_a_budget_fails(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R91: what is not bounded is not verified."""
    installed.write("testing/budgets.py", "from cake_core.testing.case import Budget\nBUDGETS = {'y': Budget(1e-5)}\n")
    assert verify() == 1
    assert "toy bwd det: small: output 'dx' has no budget" in capsys.readouterr().out


def test_a_broken_declaration_is_a_failing_row(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R4, R89: an op that is disabled cannot be called verified."""
    with registry.override({"toy": registry.op_spec("toy"), "sour": registry.op_spec("toy")}):
        assert verify() == 1
        assert "sour - -: broken declaration: " in capsys.readouterr().out
        assert verify("toy") == 0


def test_each_variant_is_configured_while_it_runs(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R14: the variant reaches the op through configure, as in a trainer."""
    installed.write(
        "api.py",
        "from cake_core import config\ndef double(x):\n    return x * 2 if config.variant('toy') == 'det' else x * 3\n",
    )
    assert verify("--json") == 1
    found = rows(capsys)
    assert found["fwd", "det"]["status"] == "ok"
    assert found["fwd", "fast"]["status"] == "failed"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cake_toy_variant": "fast", "cake_toy_check": True, "cake_workspace_pool_bytes": 4096},
        {"deterministic_mode": True},
    ],
)
def test_the_configuration_is_restored(
    options: dict[str, Any], installed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """R13: also when the op failed; verify may be called inside somebody's process."""

    def seen() -> dict[str, Any]:
        return {key: value for key, value in config.snapshot().items() if key != "generation"}

    config.configure(**options)
    before = seen()
    installed.write("api.py", "def double(x):\n    raise RuntimeError\n")
    assert verify() == 1
    assert seen() == before


def test_an_op_without_the_wanted_variant_is_left_out_unless_it_is_named(
    installed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """R89: `cake verify --variant fast` is about the ops that have it."""
    toy = registry.op_spec("toy")
    only = type(toy)(
        name="only", variants=("det",), selected_by=toy.selected_by, impl=toy.impl, entry_points=toy.entry_points
    )
    with registry.override({"toy": toy, "only": only}):
        assert verify("--variant", "fast", "--json") == 0
        assert {row["op"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"toy"}
        assert verify("only", "--variant", "fast") == 1
        assert "--variant is 'fast'; needs one of only's: det" in capsys.readouterr().err


def test_an_unknown_op_is_refused_in_the_name_of_the_command(
    installed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """R6, R89: the message names what the user called."""
    assert verify("toi") == 1
    assert capsys.readouterr().err.startswith("cake: verify: op is 'toi'; needs an installed op: toy")


def test_cuda_without_a_device_is_one_line(installed: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """R89: never a silent fallback to the CPU."""
    assert cli.main(["verify", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == (
        "cake: verify: --device is 'cuda' on a machine without a CUDA device; needs 'cpu'\n"
    )


def test_a_child_process_verifies(toy: Toy) -> None:
    """R89: from an installed distribution, through the process boundary, success and failure."""
    done = toy.command("verify", "toy", "--device", "cpu", "--variant", "det")
    assert (done.returncode, done.stderr) == (0, "")
    toy.write("api.py", "def double(x):\n    return x * 2.04  # wrong\n")
    done = toy.command("verify", "toy", "--device", "cpu", "--variant", "det")
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 of 2 rows failed" in done.stdout.splitlines()[-1]
