"""The configuration: replaced whole, atomic, read at every call, cheap to read."""

from __future__ import annotations

import argparse
import builtins
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from cake_core import config, configure, option, registry, variant
from cake_core.spec import Flag, OpSpec
from cake_core.testing.host_time import timed, work


def op(name: str, variants: tuple[str, ...] = ("det", "fast"), flags: tuple[Flag, ...] = ()) -> OpSpec:
    return OpSpec(name, variants, ((f"{name}_backend", "cake"),), f"cake_{name}.api", ("run",), flags=flags)


A = op(
    "a",
    flags=(
        Flag("cake_a_rows", 64, "int", minimum=1, help="rows"),
        Flag("cake_a_scale", 1.0, "float", minimum=0, help="scale"),
        Flag("cake_a_mode", None, "str", choices=("light", "full"), help="mode"),
        Flag("cake_a_check", help="check"),
    ),
)
SPECS = {"a": A, "b": op("b"), "fastonly": op("fastonly", ("fast",))}


@pytest.fixture(autouse=True)
def three_ops() -> Iterator[None]:
    with registry.override(SPECS):
        yield


def reading() -> tuple[Any, ...]:
    options = tuple(option("a", flag.dest) for flag in A.flags)
    return variant("a"), variant("b"), options, config.pool_bytes(), config.generation()


FAILING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown keyword": ({"cake_a_row": 3}, TypeError, "'cake_a_row'.*did you mean 'cake_a_rows'"),
    "variant of an op with one": ({"cake_fastonly_variant": "fast"}, TypeError, "'cake_fastonly_variant'"),
    "keyword of an op that is not installed": ({"cake_gqa_variant": "det"}, TypeError, "pip install cake-gqa"),
    "unknown variant": ({"cake_a_variant": "exact"}, ValueError, "--cake-a-variant is 'exact'"),
    "variant of another type": ({"cake_a_variant": 1}, TypeError, "--cake-a-variant"),
    "fast in deterministic mode": ({"cake_a_variant": "fast", "deterministic_mode": True}, ValueError, "'fast'.*'det'"),
    "below the minimum": ({"cake_a_rows": 0}, ValueError, "--cake-a-rows is 0; needs at least 1"),
    "bool for an int": ({"cake_a_rows": True}, TypeError, "--cake-a-rows is True"),
    "str for a float": ({"cake_a_scale": "2"}, TypeError, "--cake-a-scale"),
    "outside the choices": ({"cake_a_mode": "heavy"}, ValueError, "--cake-a-mode.*'light', 'full'"),
    "int for a switch": ({"cake_a_check": 1}, TypeError, "--cake-a-check"),
    "negative pool": ({"cake_workspace_pool_bytes": -1}, ValueError, "--cake-workspace-pool-bytes is -1"),
    "bool pool": ({"cake_workspace_pool_bytes": True}, TypeError, "--cake-workspace-pool-bytes"),
    "deterministic mode of another type": ({"deterministic_mode": "no"}, TypeError, "--deterministic-mode is 'no'"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_failing_configure_changes_nothing(case: str) -> None:
    """R12: whatever is wrong, wherever it stands among right values."""
    options, error, text = FAILING[case]
    configure(cake_a_variant="fast", cake_a_rows=8, cake_b_variant="fast", cake_workspace_pool_bytes=1 << 20)
    before = reading()
    right = {"cake_b_variant": "det", "cake_workspace_pool_bytes": 5, "cake_a_scale": 0.5}
    with pytest.raises(error, match=text):
        configure(**{**right, **options})
    assert reading() == before


def test_configure_replaces_everything() -> None:
    """R13: what is not given returns to its default."""
    configure(cake_a_rows=8, cake_a_scale=2, cake_a_mode="full", cake_a_check=True, cake_workspace_pool_bytes=7)
    assert reading()[2:4] == ((8, 2, "full", True), 7)
    configure(cake_a_rows=16)
    assert reading()[2:4] == ((16, 1.0, None, False), 0)
    configure()
    assert reading()[:4] == ("det", "det", (64, 1.0, None, False), 0)


def test_one_function_object_follows_the_configuration_between_its_calls() -> None:
    """R14: variant and option are read when the call runs."""
    calls: list[tuple[str, int]] = []

    def run() -> None:
        calls.append((variant("a"), option("a", "cake_a_rows")))

    run()
    configure(cake_a_variant="fast", cake_a_rows=8)
    run()
    configure(deterministic_mode=True)
    run()
    assert calls == [("det", 64), ("fast", 8), ("det", 64)]


def test_reading_the_configuration_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """R15: 100 ns for a variant, 150 ns for an option, 60 and 75 on an idle machine; no import."""
    configure(cake_a_variant="fast", cake_a_rows=8)
    assert (variant("a"), option("a", "cake_a_rows")) == ("fast", 8)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an import or a look-up on the hot path")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "op_spec", forbidden)
        patch.setattr(builtins, "__import__", forbidden)
        for read, instructions, bound in (
            (lambda: variant("a"), 11, 100),
            (lambda: option("a", "cake_a_rows"), 14, 150),
        ):
            found = work(read)
            assert found.functions <= 2
            assert found.instructions <= instructions
            assert timed(read, enough=bound).nanoseconds <= bound


def test_memos_are_dropped_by_configure_and_by_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """R16: one look-up after each change, none in between."""
    lookups: list[str] = []
    found = registry.op_spec

    def counting(name: str, *, entry: str = "op_spec") -> OpSpec:
        if entry in ("variant", "option"):
            lookups.append(entry)
        return found(name, entry=entry)

    monkeypatch.setattr(registry, "op_spec", counting)

    def read() -> int:
        lookups.clear()
        for _ in range(3):
            variant("a")
            option("a", "cake_a_rows")
        return len(lookups)

    configure()
    assert read() == 2
    assert read() == 0
    configure()
    assert read() == 2
    registry.refresh()
    assert read() == 2
    with registry.override({"a": op("a", ("fast",), A.flags)}):
        assert read() == 2
        assert variant("a") == "fast"
    assert read() == 2
    assert variant("a") == "det"


def test_the_configuration_survives_a_change_of_the_registry() -> None:
    """R16: the memo is dropped, what was asked for is not."""
    configure(cake_a_variant="fast", cake_a_rows=8)
    generation = config.generation()
    with registry.override({"b": SPECS["b"]}):
        pass
    assert (variant("a"), option("a", "cake_a_rows"), config.generation()) == ("fast", 8, generation)


@dataclass
class Typed:
    cake_a_variant: str = "fast"
    cake_a_rows: int = 8


@pytest.mark.parametrize("kind", [argparse.Namespace, SimpleNamespace, Typed])
def test_configure_reads_attributes_of_any_object_and_only_its_own(kind: type) -> None:
    """R13: Namespace, SimpleNamespace and dataclass; missing attributes, None and foreign attributes are no error."""
    args = kind(cake_a_variant="fast", cake_a_rows=8)
    args.other_argument = object()
    args.cake_a_scale = None
    configure(args)
    assert (variant("a"), option("a", "cake_a_rows"), option("a", "cake_a_scale")) == ("fast", 8, 1.0)
    configure(args, cake_a_variant="det")
    assert (variant("a"), option("a", "cake_a_rows")) == ("det", 8)


def test_a_mapping_is_refused_instead_of_configuring_nothing() -> None:
    with pytest.raises(TypeError, match=r"args is a mapping.*configure\(\*\*options\)"):
        configure({"cake_a_variant": "fast"})


def test_an_unknown_option_names_the_flags_of_the_op() -> None:
    with pytest.raises(ValueError, match=r"option: dest is 'cake_a_row'.*did you mean 'cake_a_rows'"):
        option("a", "cake_a_row")
    with pytest.raises(ValueError, match="the op has no flags"):
        option("b", "cake_a_rows")


def test_the_default_variant_is_told_from_one_that_was_asked_for() -> None:
    assert config.variant_is_default("a")
    configure(cake_b_variant="fast")
    assert config.variant_is_default("a")
    assert not config.variant_is_default("b")
    configure(cake_a_variant="det")
    assert not config.variant_is_default("a")
    configure(deterministic_mode=True)
    assert not config.variant_is_default("fastonly")


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Let threads interrupt each other nearly everywhere."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless_threads")
def test_readers_never_see_two_configurations_mixed() -> None:
    """R22: the values of a configuration belong together, in a snapshot and for whoever saw one generation; the thread
    that configures reads its own configuration afterwards, whatever readers do meanwhile."""
    values = ({"a": "fast", "b": "fast", "rows": 1}, {"a": "det", "b": "det", "rows": 2})
    stop = threading.Event()
    wrong: list[Any] = []

    def seen() -> dict[str, Any]:
        return {"a": variant("a"), "b": variant("b"), "rows": option("a", "cake_a_rows"), "pool": config.pool_bytes()}

    def right(found: dict[str, Any]) -> bool:
        return found in [{**value, "pool": value["rows"]} for value in values]

    def apply(value: dict[str, Any]) -> None:
        configure(
            cake_a_variant=value["a"],
            cake_b_variant=value["b"],
            cake_a_rows=value["rows"],
            cake_workspace_pool_bytes=value["rows"],
        )

    def read() -> None:
        while not stop.is_set():
            generation = config.generation()
            found = seen()
            if config.generation() == generation and not right(found):
                wrong.append(found)

    def shoot() -> None:
        while not stop.is_set():
            shot = config.snapshot()
            a, b = shot["ops"]["a"], shot["ops"]["b"]
            rows, pool = a["options"]["cake_a_rows"], shot["cake_workspace_pool_bytes"]
            if not right(found := {"a": a["variant"], "b": b["variant"], "rows": rows, "pool": pool}):
                wrong.append(found)

    apply(values[0])
    readers = [threading.Thread(target=target) for target in (read, read, shoot)]
    for thread in readers:
        thread.start()
    for i in range(6000):
        apply(values[i % 2])
        if i % 100 == 0:
            registry.refresh()
        if seen() != {**values[i % 2], "pool": values[i % 2]["rows"]}:
            wrong.append(seen())
    stop.set()
    for thread in readers:
        thread.join()
    assert not wrong, wrong[:3]


def test_a_reason_is_logged_once_per_configuration_op_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    """R23: again after configure; a change of the registry is not a new configuration."""

    def say() -> list[str]:
        caplog.clear()
        for _ in range(2):
            config.warn_runs_det("a", "a mask is given")
            config.warn_runs_det("a", "head dim 96")
            config.warn_runs_det("b", "a mask is given")
            config.log_once("a", "starts cold")
        return [record.getMessage() for record in caplog.records if record.name == "cake"]

    with caplog.at_level(logging.INFO, "cake"):
        configure(cake_a_variant="fast")
        first = say()
        assert len(first) == 4
        assert first[0].startswith("a: ")
        assert first[0].endswith("a mask is given")
        assert "det" in first[0]
        assert first[3] == "a: starts cold"
        reasons = {name: found["reasons"] for name, found in config.snapshot()["ops"].items()}
        assert reasons == {
            "a": ["a mask is given", "head dim 96", "starts cold"],
            "b": ["a mask is given"],
            "fastonly": [],
        }
        registry.refresh()
        assert say() == []
        configure(cake_a_variant="fast")
        assert config.snapshot()["ops"]["a"]["reasons"] == []
        assert say() == first


class MeetingLock:
    """A lock at whose door two threads wait for each other."""

    def __init__(self) -> None:
        self.lock, self.door = threading.Lock(), threading.Barrier(2, timeout=30)

    def __enter__(self) -> None:
        self.door.wait()
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_threads_that_find_one_reason_log_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R23: both threads have seen that the reason is new before either notes it."""
    with caplog.at_level(logging.INFO, "cake"), monkeypatch.context() as patch:
        patch.setattr(config, "_lock", MeetingLock())
        threads = [threading.Thread(target=config.log_once, args=("a", "a mask is given")) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [record.getMessage() for record in caplog.records] == ["a: a mask is given"]


def test_a_call_that_only_det_serves_says_why_once_and_the_snapshot_lists_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R23: X05, the reason for refusing the configured variant is not thrown away (synthetic op)."""
    import torch
    from cake_core.testing import synthetic_op

    with registry.override({"synthetic": synthetic_op.OP}), caplog.at_level(logging.INFO, "cake"):
        configure(cake_synthetic_variant="fast")
        for _ in range(2):
            synthetic_op.scale_columns(torch.ones(2, 3), torch.ones(3))
        (reason,) = config.snapshot()["ops"]["synthetic"]["reasons"]
        assert "rows" in reason
        (record,) = [record.getMessage() for record in caplog.records if record.name == "cake"]
        assert record.startswith("synthetic: ")
        assert reason in record


def test_the_snapshot_is_plain_data_and_tells_what_a_call_would_raise() -> None:
    """R23: the whole resolved configuration, for logs."""
    configure(cake_a_rows=8, deterministic_mode=True, cake_workspace_pool_bytes=9)
    shot = json.loads(json.dumps(config.snapshot()))
    assert shot["generation"] == config.generation()
    assert shot["deterministic_mode"] is True
    assert shot["cake_workspace_pool_bytes"] == 9
    assert shot["ops"]["a"]["variant"] == "det"
    assert shot["ops"]["a"]["variant_is_default"] is False
    assert shot["ops"]["a"]["options"]["cake_a_rows"] == 8
    assert shot["ops"]["fastonly"]["variant"] is None
    assert "'fastonly'" in shot["ops"]["fastonly"]["error"]


def test_torch_is_asked_but_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1: a process without torch has no deterministic algorithms."""
    import torch

    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert config.torch_deterministic()
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch")
            assert not config.torch_deterministic()
            assert "torch" not in sys.modules
    finally:
        torch.use_deterministic_algorithms(False)
    assert not config.torch_deterministic()


@pytest.mark.parametrize(("value", "want"), [("debug", "10"), ("ERROR", "40"), ("", "0")])
def test_the_log_level_of_the_environment_counts_from_the_first_configure(value: str, want: str) -> None:
    code = (
        "import logging, cake_core; log = logging.getLogger('cake'); assert log.level == 0; cake_core.configure();"
        "print(log.level); log.setLevel(25); cake_core.configure(); assert log.level == 25"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CAKE_LOG": value},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == want


def test_a_log_level_that_is_none_names_the_variable() -> None:
    code = "import cake_core; cake_core.configure()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "CAKE_LOG": "loud"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "ValueError: cake: CAKE_LOG is 'loud'; needs one of" in done.stderr
