"""Tables of offsets in host memory: made once a layout, dropped by ``release`` and by many other layouts, kept where a
captured graph has their addresses. On a fake device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cake_core.testing.fake_cuda import FakeCuda
from cake_gdn import api
from cake_gdn.backends import sm90
from cake_gdn.backends.operands import Documents, Operands
from torch import Tensor

LAYOUT = (0, 65, 65, 100)
ROWS = (0, 1, 2)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(sm90, "_captured", {})
    sm90.release()
    with FakeCuda(capability=(9, 0)) as fake:
        yield fake
    sm90.release()


def _tables(offsets: tuple[int, ...], entering: Any = None, leaving: Any = None) -> Any:
    rows = torch.empty(offsets[-1], 1, 128, device="meta")
    documents = Documents(None, len(offsets) - 1, 0, offsets)
    gates = rows[..., 0]
    return sm90._tables(Operands(rows, rows, rows, gates, gates, documents, None), 0, entering, leaving)


def _other_layouts(count: int) -> None:
    for n in range(count):
        _tables((0, n + 1, 1000))


def _gone(tensor: weakref.ref[Tensor]) -> bool:
    gc.collect()
    return tensor() is None


def test_a_layout_is_made_once(fake: FakeCuda) -> None:
    first, again = _tables(LAYOUT), _tables(LAYOUT)
    assert again is first
    assert first.chunks.tolist() == [[0, 64], [64, 1], [65, 35]]
    assert first.ends == 100
    assert _tables(LAYOUT, ROWS).segments.tolist() == [[0, 65, 0, 0, -1], [65, 35, 2, 2, -1]]


@pytest.mark.parametrize("drop", [api.release, lambda: _other_layouts(256)], ids=["release", "other layouts"])
def test_tables_that_no_graph_reads_are_dropped(fake: FakeCuda, drop: Any) -> None:
    chunks = weakref.ref(_tables(LAYOUT).chunks)
    drop()
    assert _gone(chunks)


@pytest.mark.parametrize("drop", [api.release, lambda: _other_layouts(300)], ids=["release", "other layouts"])
def test_tables_that_a_capture_used_stay(fake: FakeCuda, drop: Any) -> None:
    """Those that it did not use, of the same documents, do not."""
    _tables(LAYOUT)
    unused = weakref.ref(_tables(LAYOUT, ROWS).chunks)
    with fake.capture(0):
        captured = _tables(LAYOUT)
    address = captured.segments.data_ptr()
    chunks = weakref.ref(captured.chunks)
    del captured
    for _ in range(2):
        drop()
        assert not _gone(chunks)
    assert _gone(unused)
    assert _tables(LAYOUT).segments.data_ptr() == address


def test_a_later_capture_takes_the_tables_of_an_earlier_one(fake: FakeCuda) -> None:
    """Also after they were dropped from what is kept for speed: nothing is uploaded, so nothing is refused."""
    _tables(LAYOUT)
    with fake.capture(0):
        first = _tables(LAYOUT)
    api.release()
    with fake.capture(0):
        assert _tables(LAYOUT) is first
        with pytest.raises(RuntimeError, match="while a graph is captured"):
            _tables((0, 7))
    assert list(sm90._captured) == [(LAYOUT, 0, None, None)]


def test_graphs_of_one_layout_read_the_same_tables(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may have uploaded them at one time: what another graph reads is kept, and read."""
    made = sm90._host_tables(LAYOUT, 0, None, None)
    sm90.release()
    late = sm90._host_tables(LAYOUT, 0, None, None)
    assert late[1] is not made[1]
    known = iter((made, late, late))
    with monkeypatch.context() as patched:
        patched.setattr(sm90, "_host_tables", lambda *layout: next(known))
        with fake.capture(0):
            assert all(_tables(LAYOUT) is made[1] for _ in range(2))
        assert _tables(LAYOUT) is late[1]
