"""What ``testing.sanitizer`` runs, with a stand-in for compute-sanitizer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cake_core.testing.sanitizer import TOOLS, sanitized

_STAND_IN = """#!/bin/sh
echo "$@"
echo "caching off: $PYTORCH_NO_CUDA_MEMORY_CACHING" >&2
for last; do :; done
case $last in *fault*) exit 9 ;; esac
"""


def test_every_tool_runs_the_script_and_its_planted_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(_STAND_IN)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with sanitized("print(1)", "conv1d", {"memcheck": "fault()"}) as runs:
        done = {name: run.result() for name, run in runs.items()}
    assert set(done) == {*TOOLS, "planted memcheck"}
    assert [done[name].returncode for name in (*TOOLS, "planted memcheck")] == [0, 0, 0, 9]
    for name, run in done.items():
        assert f"--tool {name.removeprefix('planted ')} --error-exitcode 9" in run.stdout
        assert ("--kernel-name kns=conv1d" in run.stdout) is (name != "initcheck")
        assert "caching off: 1" in run.stdout
