"""GPU checks 2 and 3: captured graphs outlive the pool's buffers and the runtime's references to libraries."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from cake_core import configure, device, no_build, release, workspace
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.synthetic_op import api
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device"),
]
ROWS, COLUMNS = 3000, 256
SCRATCH = 4 * COLUMNS * -(-ROWS // 256)  # of one backward: a partial sum for every 256 rows


class Captured:
    """One forward and backward of the synthetic op in a graph; the backward takes scratch from the workspace."""

    def __init__(self) -> None:
        self.x, self.dy = (torch.empty(ROWS, COLUMNS, device="cuda") for _ in range(2))
        self.weight = torch.empty(COLUMNS, device="cuda")
        self.refill(0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.eager()  # code is loaded outside of the capture
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.eager()

    def eager(self) -> list[Tensor]:
        y = api.scale_columns_fwd(self.x, self.weight)
        dx, dweight = api.scale_columns_bwd(self.dy, self.x, self.weight)
        assert dx is not None
        assert dweight is not None
        return [y, dx, dweight]

    def refill(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for operand in (self.x, self.weight, self.dy):
            operand.normal_(generator=generator)

    def assert_replays(self, seed: int) -> None:
        """On other contents, and without a write to memory that the graph does not own."""
        self.refill(seed)
        want = self.eager()
        others = [torch.full((SCRATCH,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(300)]
        for output in self.outputs:
            output.fill_(torch.nan)
        self.graph.replay()
        for name, got, expected in zip(("y", "dx", "dweight"), self.outputs, want, strict=True):
            assert bool(expected.isfinite().all())
            assert_same_bits(got, expected, f"replayed {name}")
        assert bool((torch.stack(others) == 0x5A).all()), "the replay wrote to somebody else's memory"


@pytest.mark.nvcc
def test_a_graph_replays_after_release(synthetic: None, mapped: Callable[[str], set[str]]) -> None:
    """R42: GPU check 2. No library is unloaded, and the next call finds it where it was."""
    configure(cake_workspace_pool_bytes=1 << 24)
    captured = Captured()
    libraries = mapped("/scale_")
    assert any("/scale_fwd_" in file for file in libraries)
    assert any("/scale_bwd_det_" in file for file in libraries)
    for seed in (1, 2):
        release()
        gc.collect()
        assert mapped("/scale_") == libraries
        with no_build():
            captured.assert_replays(seed)
    assert mapped("/scale_") == libraries


EVICTIONS = {"a lower bound": SCRATCH // 2, "bound 0": 0, "another role": 2 * SCRATCH, "release_pool": 2 * SCRATCH}


@pytest.mark.nvcc
@pytest.mark.parametrize("evict", EVICTIONS)
def test_a_graph_replays_after_the_pool_evicted_what_it_had(synthetic: None, evict: str) -> None:
    """R69: GPU check 3. The capture takes nothing out of the pool and leaves nothing in it."""
    configure(cake_workspace_pool_bytes=2 * SCRATCH)
    before = workspace.stats()
    captured = Captured()
    after = workspace.stats()
    assert after["captured"] - before["captured"] == 1
    assert (after["misses"] - before["misses"], after["entries"]) == (1, 1), "of the call before the capture"
    captured.assert_replays(1)
    bound = EVICTIONS[evict]
    configure(cake_workspace_pool_bytes=bound)
    if evict == "release_pool":
        workspace.release_pool()
    workspace.take("synthetic", "another", 2 * SCRATCH)
    kept = {torch.cuda.current_device(): 2 * SCRATCH} if bound == 2 * SCRATCH else {}
    assert workspace.stats()["held"] == kept
    captured.assert_replays(2)


def test_a_graph_owns_what_it_takes_and_replays_after_the_pool_is_gone() -> None:
    """R69: GPU check 3. Scratch that was pooled before the capture is not the scratch of the capture."""
    configure(cake_workspace_pool_bytes=1 << 24)
    index = torch.cuda.current_device()
    pooled = workspace.take("demo", "a", 1 << 20, index)
    before = workspace.stats()
    graph, result = torch.cuda.CUDAGraph(), torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.graph(graph):
        assert device.capturing(index)
        scratch = workspace.take("demo", "a", 1 << 20, index)
        assert scratch.data_ptr() != pooled.data_ptr()
        scratch.fill_(7)
        result.copy_(scratch)
    assert not device.capturing(index)
    assert workspace.stats()["captured"] - before["captured"] == 1
    assert workspace.take("demo", "a", 1 << 20, index) is pooled
    del scratch, pooled
    workspace.release_pool()
    others = torch.full((8, 1 << 20), 9, dtype=torch.uint8, device="cuda")
    graph.replay()
    assert bool((result == 7).all())
    assert bool((others == 9).all())


def test_a_pooled_side_stream_is_asked_whether_it_captures() -> None:
    """R69: GPU check 3. The same stream before, in and after a capture; the default stream during one of another."""
    configure(cake_workspace_pool_bytes=1 << 20)
    side = torch.cuda.Stream()
    index = torch.cuda.current_device()
    with torch.cuda.stream(side):
        pooled = workspace.take("demo", "a", 4096, index)
        assert workspace.take("demo", "a", 4096, index) is pooled
    on_default = workspace.take("demo", "a", 4096, index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        captured = workspace.take("demo", "a", 4096, index)
        captured.fill_(1)
        with torch.cuda.stream(torch.cuda.default_stream()):
            assert workspace.take("demo", "a", 4096, index) is on_default
    assert captured.data_ptr() not in (pooled.data_ptr(), on_default.data_ptr())
    with torch.cuda.stream(side):
        assert workspace.take("demo", "a", 4096, index) is pooled
