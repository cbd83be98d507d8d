"""compute-sanitizer over every kernel of ``conv1d``, malformed offsets among its operands. Needs a GPU and the tool."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from cake_conv1d.testing.steps import make_step
from cake_core import configure, workspace
from cake_core.testing.sanitizer import TOOLS, Runs, assert_clean, assert_found, sanitized

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on PATH"),
]

_SANITIZED = """
import torch
from dataclasses import replace
from cake_conv1d import api, kcp, plan
from cake_conv1d.backends.operands import Options
from cake_conv1d.testing.steps import make_step
from cake_core.kcp import build_context_kcp, partition_kcp
from cake_core.testing.sanitizer import edge

DEVICE = "cuda"

def finite(outputs):
    assert all(bool(value.cpu().isfinite().all()) for value in outputs if value is not None)

def moved(step, cu=None):
    small = {name: getattr(step, name) for name in ("weight", "state", "d_final")}
    small["cu"] = step.cu if cu is None else torch.tensor(cu, dtype=torch.int32)
    small = {name: None if value is None else value.to(DEVICE) for name, value in small.items()}
    return replace(step, x=edge(step.x, 8, DEVICE), dy=edge(step.dy, 16, DEVICE), **small)

MALFORMED = (
    (0, 200, 100, 250, 300),
    (-5, 30, -3, 200, 300),
    (0, 80, 1000, 100, 300),
    (0, 80, 120),
    (50, 100, 300),
    (-2147483648, 2147483647, 5, 300),
    (400, 500),
    tuple(37 * n % 301 for n in range(70)),
)
seen = []
cases = [
    ((300,), 264, {}),
    ((0, 1, 0, 2, 3, 100, 0, 33, 161, 0), 264, {"weight": "float32", "state": "float32"}),
    ((0, 1, 0, 2, 3, 100, 0, 33, 161, 0), 264, {"state": "bfloat16", "width": 3}),
    ((299, 1), 264, {"width": 2, "weight": "float32", "activation": None}),
    ((1,) * 300, 264, {"state": "bfloat16"}),
    ((1,), 8, {"state": "bfloat16"}),
    ((5, 1100), 16, {}),
    ((37,), 2048, {"weight": "float32"}),
]
for lengths, channels, options in cases:
    step = moved(make_step(lengths, channels, device="cpu", **options))
    finite(step.run().values())
    rest = {"activation": step.activation, "initial_state": step.state}
    for needs in ((True, False, False), (False, True, False)):
        finite(api.causal_conv1d_bwd(step.x, step.weight, step.dy, step.cu, needs=needs, **rest))
    seen.append(plan.plan_backward(*step.x.shape).partial_rows)
for cu in MALFORMED:
    for state in (None, "bfloat16"):
        lengths = (300,) + (0,) * (len(cu) - 2)
        finite(moved(make_step(lengths, 264, device="cpu", state=state), cu).run().values())
# The edges of fragments: one rank whose zigzag crosses between its own two parts.
for width in (2, 3, 4):
    part = partition_kcp((0, 40, 130, 132, 300), 1, "zigzag_per_document")
    ctx = build_context_kcp(part, None, 0, DEVICE, width)
    steps = [moved(make_step((300,), c, device="cpu", width=width, seed=c)) for c in (264, 8)]
    xs, weights = tuple(step.x for step in steps), tuple(step.weight for step in steps)
    names = [("xs[0]", "weights[0]"), ("xs[1]", "weights[1]")]
    call = kcp.prepare("sanitizer", names, xs, weights, ctx, Options(True, True))
    ys, pool = kcp.forward(call, xs, weights)
    dxs, dweights = kcp.backward(call, xs, weights, pool, [step.dy for step in steps], [(True, True)] * 2)
    finite((*ys, *dxs, *dweights))
assert min(seen) == 1 and max(seen) > 32, seen
torch.cuda.synchronize()
print("done")
"""
# A read of 16 bytes behind the operand (torch itself makes no such view), and a read of what nobody wrote.
_PLANTED = """
import torch
from cake_conv1d import causal_conv1d_fwd
w = torch.zeros(264, 4).to("cuda")
x = torch.zeros(37, 264, dtype=torch.bfloat16).to("cuda")
class Behind:
    __cuda_array_interface__ = {
        "shape": (37, 264), "typestr": "<i2", "data": (x.data_ptr() + 16, False), "version": 2
    }
FAULT
causal_conv1d_fwd(x, w)
torch.cuda.synchronize()
"""
_FAULTS = {
    "memcheck": "x = torch.as_tensor(Behind(), device='cuda').view(torch.bfloat16)",
    "initcheck": "x = torch.empty(37, 264, dtype=torch.bfloat16, device='cuda')",
}


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    configure()
    make_step((5, 3), 264, device=DEVICE, state="bfloat16").run()  # all three libraries are compiled before
    torch.cuda.synchronize()
    workspace.release_pool()
    with sanitized(
        _SANITIZED, "conv1d", {tool: _PLANTED.replace("FAULT", fault) for tool, fault in _FAULTS.items()}
    ) as runs:
        yield runs


@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(runs: Runs, tool: str) -> None:
    """Every kernel, width and edge; one partial row and many; documents of every length; malformed offsets."""
    assert_clean(runs, tool)


@pytest.mark.parametrize(
    ("tool", "text"), [("memcheck", "Invalid __global__ read"), ("initcheck", "Uninitialized __global__ memory read")]
)
def test_the_sanitizer_finds_a_planted_fault(runs: Runs, tool: str, text: str) -> None:
    """What the other test relies on."""
    assert_found(runs, f"planted {tool}", text, "conv1d_fwd")
