"""compute-sanitizer over every kernel of ``gdn``, malformed offsets among its operands. Needs a GPU and the tool."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from cake_core import configure, workspace
from cake_core.testing.sanitizer import TOOLS, Runs, sanitized
from cake_gdn.testing.steps import make_step

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.slow,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on PATH"),
]

_SANITIZED = """
import torch
from dataclasses import replace
from itertools import accumulate
from cake_gdn.testing.steps import make_step

DEVICE = "cuda"

def edge(rows, pad):
    # The last columns of a buffer of NaN that ends with the last token. One copy from the host fills it: the tools do
    # not look into the kernels of torch, so what those write would count as never written.
    tokens, heads, width = rows.shape[1:]
    stride = heads * width + pad
    flat = torch.full((tokens * stride,), torch.nan, dtype=rows.dtype)
    layout = (1, tokens, heads, width), (tokens * stride, stride, width, 1), pad
    flat.as_strided(*layout).copy_(rows)
    return flat.to(DEVICE).as_strided(*layout)

def finite(outputs):
    assert all(bool(value.cpu().isfinite().all()) for value in outputs.values())

def moved(step, cu=None):
    rows = {name: edge(getattr(step, name), pad) for name, pad in (("q", 8), ("k", 16), ("v", 8), ("do", 24))}
    step = replace(step, cu=step.cu if cu is None else torch.tensor(cu, dtype=torch.int32))
    return replace(step.to(DEVICE), **rows)

# Scans of 64 value columns a CTA and of 128 (more than 66 segments times heads), stages that come again (more than
# three chunks), 1 to 4 value heads of a key head, states, padding, all saved sets.
cases = [
    ((65, 0, 1, 300), (1, 2), {"state": True}),
    ((130,), (1, 3), {"norm": False, "beta": "bfloat16"}),
    ((70, *(1,) * 17), (1, 4), {"state": True, "v_first": True, "padding": 3}),
    ((40, 24), (2, 2), {"gates": "qwen-16"}),
]
for lengths, heads, options in cases:
    step = moved(make_step(lengths, heads, **options))
    finite(step.run())
    finite(step.run(save="none", cu_seqlens=None, cu_seqlens_cpu=(0, *accumulate(lengths))))
MALFORMED = (
    (0, 200, 100, 250, 300),
    (-5, 30, -3, 200, 300),
    (0, 80, 1000, 100, 300),
    (50, 100, 300),
    (-2147483648, 2147483647, 5, 300),
    (400, 500),
    tuple(37 * n % 301 for n in range(40)),
)
for cu in MALFORMED:
    moved(make_step((300,) + (0,) * (len(cu) - 2), (1, 2), state=True), cu).run()
torch.cuda.synchronize()
print("done")
"""
# A read of 16 bytes behind the operand (torch itself makes no such view), and a read of what nobody wrote.
_PLANTED = """
import torch
from cake_gdn import chunk_gated_delta_rule_fwd
q, k, v = (torch.ones(1, 64, 1, 128, dtype=torch.bfloat16).to("cuda") for _ in range(3))
g, beta = (torch.zeros(1, 64, 1).to("cuda") for _ in range(2))
class Behind:
    __cuda_array_interface__ = {
        "shape": (1, 64, 1, 128), "typestr": "<i2", "data": (q.data_ptr() + 16, False), "version": 2
    }
FAULT
chunk_gated_delta_rule_fwd(x, k, v, g, beta, use_qk_l2norm_in_kernel=True)
torch.cuda.synchronize()
"""
_FAULTS = {
    "memcheck": "x = torch.as_tensor(Behind(), device='cuda').view(torch.bfloat16)",
    "initcheck": "x = torch.empty(1, 64, 1, 128, dtype=torch.bfloat16, device='cuda')",
}


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    configure()
    make_step((5, 3), (1, 2), state=True).to(DEVICE).run()  # all five libraries are compiled before
    torch.cuda.synchronize()
    workspace.release_pool()
    torch.cuda.empty_cache()
    with sanitized(
        _SANITIZED, "gdn", {tool: _PLANTED.replace("FAULT", fault) for tool, fault in _FAULTS.items()}
    ) as runs:
        yield runs


@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(runs: Runs, tool: str) -> None:
    """Every kernel and instance of it; documents of every kind; malformed offsets."""
    done = runs[tool].result()
    assert done.returncode == 0, done.stdout[:4000] + done.stdout[-2000:]
    assert "done" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("tool", "text"), [("memcheck", "Invalid __global__ read"), ("initcheck", "Uninitialized __global__ memory read")]
)
def test_the_sanitizer_finds_a_planted_fault(runs: Runs, tool: str, text: str) -> None:
    """What the other test relies on: the tool sees our kernels and operands that end with their allocations."""
    done = runs[f"planted {tool}"].result()
    assert done.returncode != 0
    assert text in done.stdout, done.stdout[-4000:]
    assert "gdn_prep" in done.stdout
