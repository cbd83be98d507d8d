"""The command with the ops that are really installed beside cake-core."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest
from cake_core import cli, registry

pytestmark = pytest.mark.skipif(not registry.ops() and not registry.failures(), reason="no op is installed")


def test_every_installed_op_is_listed_and_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    """R83, R89: with its distribution."""
    assert cli.main(["ops", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ops"]
    assert [op["op"] for op in found] == list(registry.ops())
    assert all(op["distribution"] and op["version"] for op in found)


def test_every_build_json_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """R87: what `cake manifest` would write is what is there."""
    assert cli.main(["manifest", "--check"]) == 0, capsys.readouterr().out


def test_every_installed_op_verifies_within_a_minute_of_two_cores() -> None:
    """R91, R92: the first command of the README, on the CPU. Processor time, so that other work does not count; no
    thread may spin while it waits, or the other work counts after all (12 s of work have read as 121 s)."""
    pytest.importorskip("torch")
    command = (sys.executable, "-m", "cake_core.cli", "verify", "--device", "cpu", "--json")
    env = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    document = json.loads(done.stdout)
    assert done.returncode == 0, [row for row in document["rows"] if row["problems"]]
    assert {row["op"] for row in document["rows"]} == set(registry.ops())
    assert after.ru_utime - before.ru_utime < 2 * 60
