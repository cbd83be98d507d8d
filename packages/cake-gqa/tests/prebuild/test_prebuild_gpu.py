"""After one ``prebuild`` no call of ``gqa`` compiles anything (a Hopper device and a compiler)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cake_core import configure, no_build, prebuild, release
from cake_core.loader import kernel_package
from cake_core.testing.routes import empty_cache
from cake_gqa import varlen_gqa_attention
from cake_gqa.testing.routes import ROUTES
from cake_gqa.testing.shapes import HEADS
from cake_gqa.testing.steps import FORMS, assert_same_step, make_step

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.prebuild,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]

# A fresh process: a library that is loaded already would not be looked up again.
_CHECK = """
import sys
from cake_core.testing.routes import check_routes
from cake_gqa.testing.routes import PREBUILD, ROUTES, run_route
check_routes("gqa", ROUTES, run_route, **PREBUILD)
peers = [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flashinfer")]
assert not peers, "a peer was imported"
print(len(ROUTES), "routes")
"""


def test_a_prebuilt_process_compiles_nothing() -> None:
    """R53, R58, R59: every call-time switch of the op, forward and backward, after one prebuild into an empty cache."""
    done = subprocess.run([sys.executable, "-c", _CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [str(len(ROUTES)), "routes"]


def test_one_prebuild_serves_every_head_count_length_form_and_later_variant() -> None:
    """R53: what is configured later builds none; nor does a side stream, the check of offsets, a graph."""
    release("gqa")
    with empty_cache():
        paths = prebuild("gqa")
        assert sorted(path.name for path in paths) == sorted({path.name for path in paths})
        assert len(paths) == len(kernel_package("gqa").libraries("sm_90a"))
        with no_build():
            for variant in ("det", "fast"):
                configure(cake_gqa_variant=variant)
                for lengths in ((0,), (1,), ((70, 300), (0, 5), 65)):
                    for heads in HEADS.values():
                        for form in FORMS:
                            make_step(lengths, heads, form=form, device="cuda").run()
            step = make_step((70, (5, 90)), (6, 2), form="add", device="cuda")
            want = step.run()
            step.forward(check_seqlens=True)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                assert_same_step(step.run(), want, "side stream")
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step.run()
            graph.replay()
            assert_same_step(captured, want, "graph")
        configure()
        release("gqa")
    torch.cuda.synchronize()


@pytest.mark.slow
def test_a_compiled_call_builds_no_library() -> None:
    release("gqa")
    with empty_cache():
        prebuild("gqa")
        with no_build():
            step = make_step((70, 5), (4, 2), device="cuda")
            q, k, v = step.leaves()
            compiled = torch.compile(varlen_gqa_attention, fullgraph=True, backend="aot_eager")
            compiled(q, k, v, step.cu_q, step.cu_k, max_seqlen_k=70).backward(step.dout)
            assert q.grad is not None
        release("gqa")
