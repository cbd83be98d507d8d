"""Whatever the order of requests and configurations: bound kept, contract kept, books right."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from cake_core import configure, workspace
from cake_core.testing.fake_cuda import FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st

Key = tuple[int, int, str]

sizes = st.one_of(st.integers(0, 12), st.integers(0, 400))
requests = st.tuples(st.just("take"), st.integers(0, 1), st.integers(0, 2), st.sampled_from("abcd"), sizes)
bounds = st.tuples(st.just("bound"), sizes)
captures = st.tuples(st.just("capture"), st.integers(0, 1), st.integers(0, 2), st.sampled_from("ab"), sizes)
releases = st.tuples(st.just("release"))


class Model:
    """The pool in twenty lines, sizes only."""

    def __init__(self) -> None:
        self.bound = 0
        self.buffers: dict[int, OrderedDict[Key, int]] = {0: OrderedDict(), 1: OrderedDict()}

    def shrink(self, index: int, bound: int) -> None:
        while sum(self.buffers[index].values()) > bound:
            self.buffers[index].popitem(last=False)

    def take(self, key: Key, nbytes: int, *, capturing: bool) -> int:
        """The size of the buffer that the request gets."""
        for index in self.buffers:
            self.shrink(index, self.bound)
        if nbytes == 0 or nbytes > self.bound or capturing:
            return nbytes
        pool = self.buffers[key[0]]
        if pool.get(key, 0) >= nbytes:
            pool.move_to_end(key)
            return pool[key]
        pool.pop(key, None)
        self.shrink(key[0], self.bound - nbytes)
        pool[key] = nbytes
        return nbytes


@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(requests, requests, requests, bounds, captures, releases), max_size=40))
def test_the_pool_never_holds_more_than_its_bound(steps: list[tuple[Any, ...]]) -> None:
    """R66, R67, R68: after every request, whatever the order, changing bounds included; which buffers stay is LRU."""
    model = Model()
    configure()
    with FakeCuda(devices=2) as fake:
        for step, *rest in steps:
            if step == "bound":
                (model.bound,) = rest
                configure(cake_workspace_pool_bytes=model.bound)
                continue
            if step == "release":
                expected = sum(sum(pool.values()) for pool in model.buffers.values())
                assert workspace.release_pool() == expected
                for pool in model.buffers.values():
                    pool.clear()
                continue
            index, stream, role, nbytes = rest
            with fake.on_stream(index, stream):
                if step == "capture":
                    with fake.capture(index):
                        buffer = workspace.take("demo", role, nbytes, index)
                else:
                    buffer = workspace.take("demo", role, nbytes, index)
            assert fake.index_of(buffer) == index
            assert buffer.numel() == model.take((index, stream, role), nbytes, capturing=step == "capture")
            held = workspace.stats()["held"]
            assert all(size <= model.bound for size in held.values())
            assert held == {index: sum(pool.values()) for index, pool in model.buffers.items() if pool}
            assert workspace.stats()["entries"] == sum(map(len, model.buffers.values()))
