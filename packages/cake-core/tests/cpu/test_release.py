"""``release``: what it drops, what it never does, and that it may run while ops run."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from cake_core import configure, loader, registry, release, workspace
from cake_core.loader import KernelPackage
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.launches import recorded_launches
from cake_core.testing.synthetic_op import OP, api, plan


class Implementations:
    """Ops whose implementations are modules of this test; ``calls`` lists the releases that ran."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.specs = {}
        self._patch = patch

    def add(self, name: str, freed: Any = 0, *, imported: bool = True, has_release: bool = True) -> None:
        impl = f"cake_release_test.{name}"
        self.specs[name] = replace(OP, name=name, impl=impl, flags=(), packages=(), libraries=None)
        if not imported:
            return
        module = ModuleType(impl)
        if has_release:

            def own_release() -> Any:
                self.calls.append(name)
                if isinstance(freed, Exception):
                    raise freed
                return freed

            module.release = own_release  # type: ignore[attr-defined]
        self._patch.setitem(sys.modules, impl, module)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Implementations:
    return Implementations(monkeypatch)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with registry.override({"synthetic": OP}), FakeCuda() as fake:
        yield fake


def test_every_imported_implementation_is_released_and_none_is_imported(ops: Implementations) -> None:
    """R60: the sum of what they freed; an implementation that is not imported, or has no release, is left alone."""
    ops.add("first", 100)
    ops.add("second", 20)
    ops.add("plain", has_release=False)
    ops.add("absent", imported=False)
    with registry.override(ops.specs):
        assert release() == 120
    assert ops.calls == ["first", "second"]
    assert "cake_release_test.absent" not in sys.modules


def test_one_op_can_be_released_alone(ops: Implementations) -> None:
    """R60: the op that is named; an unknown one is a ValueError."""
    ops.add("first", 100)
    ops.add("second", 20)
    with registry.override(ops.specs):
        assert release("second") == 20
        with pytest.raises(ValueError, match="release: op is 'third'"):
            release("third")
    assert ops.calls == ["second"]


def test_a_failing_release_does_not_stop_the_others(ops: Implementations, fake: FakeCuda) -> None:
    """R60: the errors come together at the end, each with its op; pool and memos are empty by then."""
    ops.add("bad", OSError("disk"))
    ops.add("good", 7)
    ops.add("worse", KeyError("key"))
    configure(cake_workspace_pool_bytes=1 << 20)
    with registry.override(ops.specs):
        workspace.take("good", "scratch", 4096, 0)
        with pytest.raises(ExceptionGroup, match="release") as caught:
            release()
        assert workspace.stats()["held"] == {}
        assert release("good") == 7
    assert ops.calls == ["bad", "good", "worse", "good"]
    assert [type(error) for error in caught.value.exceptions] == [OSError, KeyError]
    assert "in the release of op 'bad'" in caught.value.exceptions[0].__notes__


def test_the_pool_is_emptied_and_counted(fake: FakeCuda) -> None:
    """R60: bytes of all devices; a tensor that is still held stays valid, the next request allocates afresh."""
    configure(cake_workspace_pool_bytes=1 << 20)
    held = workspace.take("synthetic", "partial", 1000, 0)
    held.fill_(7)
    workspace.take("synthetic", "partial", 3000, 1)
    kept = sum(workspace.stats()["held"].values())
    assert kept >= 4000
    assert release() == kept
    assert workspace.stats()["entries"] == 0
    assert bool((held == 7).all())
    assert workspace.take("synthetic", "partial", 1000, 0).data_ptr() != held.data_ptr()
    assert release() > 0
    assert release() == 0


def test_a_call_after_release_works_and_plans_again(fake: FakeCuda) -> None:
    """R60, R96: the implementation's own caches are dropped, nothing else changes."""
    x, weight = fake.cuda(torch.ones(300, 8)), fake.cuda(torch.ones(8))
    with recorded_launches() as launches:
        api.scale_columns_bwd(x, x, weight)
        assert plan.plan_backward.cache_info().currsize > 0
        release("synthetic")
        assert plan.plan_backward.cache_info().currsize == 0
        api.scale_columns_bwd(x, x, weight)
    assert len(launches) == 2
    assert launches[0].library == launches[1].library


def test_loaded_modules_are_let_go(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """R42, R60: the Python references of the op that is named, or of all; the next call loads again."""

    class Module:
        def get_function(self, entry: str) -> Any:
            return lambda: entry

    opened: list[str] = []
    monkeypatch.setattr(KernelPackage, "_open", lambda self, name: opened.append(name) or Module())
    other = replace(OP, name="other", flags=())
    with registry.override({"synthetic": OP, "other": other}):
        package = loader.kernel_package("synthetic")
        module = weakref.ref(package.load("probe_sm_80"))
        release("other")
        gc.collect()
        assert module() is not None
        for op in ("synthetic", None):
            release(op)
            gc.collect()
            assert module() is None
            module = weakref.ref(package.load("probe_sm_80"))
            assert package.function("probe_sm_80")() == "run"
    assert opened == ["probe_sm_80"] * 3


def test_release_while_other_threads_call_ops(fake: FakeCuda) -> None:
    """R61: they allocate, plan and look up programs afresh; every call gets a buffer of its own size."""
    configure(cake_workspace_pool_bytes=1 << 22)
    errors: list[BaseException] = []
    stop = threading.Event()
    calls = [0] * 4

    def work(number: int) -> None:
        rows = 300 + number
        x, weight = torch.ones(rows, 8), torch.ones(8)
        for tensor in (x, weight):
            fake.place(tensor, number % 2)
        try:
            while not stop.is_set():
                api.scale_columns_bwd(x, x, weight)
                scratch = workspace.take("synthetic", "own", 1000 + number, number % 2)
                scratch[: 1000 + number] = number
                assert bool((scratch[: 1000 + number] == number).all())
                calls[number] += 1
        except BaseException as error:
            errors.append(error)

    with recorded_launches() as launches:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while min(calls) < 20 and not errors:
            release()
        stop.set()
        for thread in threads:
            thread.join()
        for launch in launches:
            _, _, partial, dy, *_ = launch.args
            assert partial.numel() >= 4 * 8 * -(-dy.shape[0] // 256)
    assert errors == []
    release()
    assert workspace.stats()["held"] == {}
