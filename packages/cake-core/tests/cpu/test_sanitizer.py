"""What ``testing.sanitizer`` runs, with a stand-in for compute-sanitizer, and what it makes of its reports."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from cake_core.testing import sanitizer
from cake_core.testing.sanitizer import (
    TOOLS,
    assert_clean,
    assert_found,
    case_scripts,
    edge,
    findings,
    sanitized,
    sanitized_runs,
    version,
    wanted_runs,
)

_STAND_IN = """#!/bin/sh
echo "$@"
echo "caching off: $PYTORCH_NO_CUDA_MEMORY_CACHING" >&2
for last; do :; done
case $last in *fault*) exit 9 ;; *hang*) sleep 60 & wait ;; esac
echo $last >>"$0.ran"
"""


@pytest.fixture(autouse=True)
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compute-sanitizer"
    path.write_text(_STAND_IN)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return path


def test_every_tool_runs_the_script_and_its_planted_faults() -> None:
    with sanitized("print(1)", "conv1d", {"memcheck": "fault()"}) as runs:
        done = {name: run.result() for name, run in runs.items()}
    assert set(done) == {*TOOLS, "planted memcheck"}
    assert [done[name].returncode for name in (*TOOLS, "planted memcheck")] == [0, 0, 0, 9]
    for name, run in done.items():
        assert f"--tool {name.removeprefix('planted ')} --error-exitcode 9" in run.stdout
        assert ("--kernel-name kns=conv1d" in run.stdout) is (name != "initcheck")
        assert ("--padding 1024" in run.stdout) is ("memcheck" in name)
        assert "caching off: 1" in run.stdout


def test_the_version_of_the_tool(tool: Path) -> None:
    tool.write_text("#!/bin/sh\necho 'NVIDIA (R) Compute Sanitizer'\necho 'Version 2025.3.1.0 (build 1) (public)'\n")
    assert version() == (2025, 3, 1, 0)
    assert version() < (2026, 1)


@pytest.mark.parametrize("worker", [False, True], ids=["one process", "one of several"])
def test_a_run_starts_ahead_or_when_it_is_asked_for(tool: Path, worker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    scripts = {name: ("racecheck", name) for name in ("first", "second", "third")}
    ran = tool.with_name("compute-sanitizer.ran")
    with sanitized_runs(scripts, "gdn", ahead=["first"], options={"racecheck": ("--num-cuda-barriers", "8")}) as runs:
        end = time.monotonic() + 10
        while not worker and not ran.exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert ran.exists() is not worker
        assert "--num-cuda-barriers 8" in runs["second"].result().stdout
        assert "--racecheck-report hazard" in runs.again("second", "--racecheck-report", "hazard").stdout
    assert sorted(ran.read_text().split()) == sorted([*([] if worker else ["first"]), "second", "second"])


def test_a_script_a_tool_and_case() -> None:
    scripts = case_scripts("a\nCASE", {"one": "1"}, "2", "b\nFAULT", {"memcheck": "fault()"})
    assert {name: code for name, (_, code) in scripts.items()} == {
        **{f"{tool}: one": "a\n1" for tool in TOOLS},
        **{f"{tool}: malformed offsets": "a\n2" for tool in ("memcheck", "initcheck")},
        "planted memcheck": "b\nfault()",
    }
    assert all(name.removeprefix("planted ").startswith(tool) for name, (tool, _) in scripts.items())


_READ = "Invalid __global__ read"
_REPORTS = """#!/bin/sh
for last; do :; done
case "$*" in *--racecheck-report*) echo "========= Potential WAR hazard" ;; esac
case $last in *version*) echo "Version 2026.4.0" ;; *done*) echo done ;; esac
case $last in *fault*)
  echo "========= Invalid __global__ read"
  echo "=========     at conv1d_fwd"
  exit 9 ;;
esac
"""


def test_a_run_is_clean_if_it_came_to_its_end_and_nothing_was_reported(tool: Path) -> None:
    """A race is told hazard by hazard; a tool that finds nothing since nothing ran is no proof."""
    tool.write_text(_REPORTS)
    code = {"clean": "done", "cut off": "", "fault": "done fault"}
    scripts = {f"{tool_}: {name}": (tool_, text) for tool_ in TOOLS for name, text in code.items()}
    with sanitized_runs(scripts, "conv1d") as runs:
        for tool_ in TOOLS:
            assert_clean(runs, f"{tool_}: clean")
            assert_found(runs, f"{tool_}: fault", _READ, "conv1d_fwd")
            for name, status in (("cut off", 0), ("fault", 9)):
                with pytest.raises(
                    AssertionError, match=f"^{tool_}: {name}: exit status {status}, tool .2026, 4"
                ) as told:
                    assert_clean(runs, f"{tool_}: {name}")
                assert ("Potential WAR hazard" in str(told.value)) is (tool_ == "racecheck")
            for run, text, kernel in (
                ("clean", _READ, "conv1d_fwd"),
                ("fault", "Uninit", "conv1d_fwd"),
                ("fault", _READ, "bwd"),
            ):
                with pytest.raises(AssertionError, match=f"^no '{text}' of {kernel}"):
                    assert_found(runs, f"{tool_}: {run}", text, kernel)


@pytest.mark.parametrize("shape", [(3, 8), (5, 2, 4)], ids=str)
def test_operands_end_with_their_allocations_and_have_nan_between_rows(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).bfloat16()
    got = edge(values.transpose(0, 1).contiguous().transpose(0, 1), 8, "cpu")
    assert torch.equal(got, values)
    width = values[0].numel()
    assert got.stride(0) == width + 8
    flat = got.as_strided((shape[0], width + 8), (width + 8, 1), 0)
    assert flat.untyped_storage().nbytes() == flat.nbytes
    assert bool(flat[:, :8].isnan().all())
    assert got.storage_offset() == 8


def test_a_run_that_hangs_ends_with_what_it_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "LIMIT", 0.5)
    with sanitized_runs({"it": ("memcheck", "hang()")}, "gdn") as runs:
        done = runs["it"].result(timeout=20)
    assert done.returncode == 124
    assert "--tool memcheck" in done.stdout


def test_runs_that_nobody_waits_for_end_with_the_context() -> None:
    begin = time.monotonic()
    with sanitized_runs({str(n): ("memcheck", "hang()") for n in range(8)}, "gdn"):
        pass
    assert time.monotonic() - begin < 20


_PRINTED = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at void cake::gdn::gdn_prep(Prep)+0x170
=========     by thread (127,0,0) in block (0,0,0)
=========     Access to 0x7f3c0a204020 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x1234567]
=========
========= Invalid __global__ read of size 16 bytes
=========     at void cake::gdn::gdn_prep(Prep)+0x170
=========     by thread (126,0,0) in block (3,0,0)
=========     Access to 0x7f3c0a204010 is out of bounds
=========
========= Error: Race reported between Write access at void cake::gdn::gdn_tail(Tail)+0x5a40
=========     and Read access at void cake::gdn::gdn_tail(Tail)+0x6b10 [128 hazards]
=========
Traceback (most recent call last):
RuntimeError: CUDA error
========= Potential WAR hazard detected at __shared__ 0x1c8 in block (0,0,0) :
=========     Read Thread (0,0,0) at void cake::gdn::gdn_tail(Tail)+0x5a40
=========     Write Thread (31,0,0) at void cake::gdn::gdn_tail(Tail)+0x6b10
=========     Current Value : 1, Incoming Value : 2
=========
========= ERROR SUMMARY: 3 errors
"""


def test_findings_show_what_differs_once_and_what_the_program_printed() -> None:
    lines = findings(_PRINTED).splitlines()
    assert lines[:2] == [
        "2 x  Invalid __global__ read of size 16 bytes",
        "          at void cake::gdn::gdn_prep(Prep)+0x170",
    ]
    assert "1 x  Error: Race reported between Write access at void cake::gdn::gdn_tail(Tail)+0x5a40" in lines
    assert "1 x  Potential WAR hazard detected at __shared__ 0x1c8 in block (0,0,0) :" in lines
    assert lines[-4:] == [
        "1 x  ERROR SUMMARY: 3 errors",
        "printed:",
        "Traceback (most recent call last):",
        "RuntimeError: CUDA error",
    ]
    assert not any("Host" in line or "host" in line for line in lines)


def test_findings_are_few_and_keep_the_summary() -> None:
    many = "".join(f"========= Race at kernel+{n:#x}\n=========\n" for n in range(100))
    lines = findings(f"{many}========= RACECHECK SUMMARY: 100 hazards\n", most=3).splitlines()
    assert lines == [
        *(f"1 x  Race at kernel+{n:#x}" for n in range(3)),
        "1 x  RACECHECK SUMMARY: 100 hazards",
        "printed:",
    ]
    assert findings("") == "printed:"


@pytest.mark.parametrize("run", ["one", "another"])
def test_a_session_wants_the_runs_of_its_tests(run: str, request: pytest.FixtureRequest) -> None:
    """Of this module's tests some have no parameter."""
    wanted = wanted_runs(request)
    assert run in wanted
    assert {*wanted} <= {"one", "another"}
