"""compute-sanitizer over every kernel of ``gqa``, malformed offsets among its operands: one short run a tool and case.
Needs a GPU and the tool."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from cake_core import configure, workspace
from cake_core.testing.sanitizer import Runs, assert_clean, assert_found, case_scripts, sanitized_runs, wanted_runs
from cake_gqa.testing.steps import FORMS, make_step

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
from cake_core.testing.sanitizer import edge
from cake_gqa.testing.steps import make_step

DEVICE = "cuda"

def moved(step, cu_q=None, cu_k=None):
    rows = {name: edge(getattr(step, name), pad, DEVICE) for name, pad in (("q", 8), ("k", 16), ("v", 8), ("dout", 24))}
    given = {"cu_q": cu_q, "cu_k": cu_k}
    step = replace(step, **{name: torch.tensor(cu, dtype=torch.int32) for name, cu in given.items() if cu is not None})
    return replace(step.to(DEVICE), **rows)

def sanitize(lengths, heads, form, **options):
    step = moved(make_step(lengths, heads, form=form, **options))
    saved = step.forward()
    for needs in ((True, True), (True, False), (False, True)):
        outputs = saved | step.backward(saved, needs=needs)
        assert not any(bool(value.cpu().isnan().any()) for value in outputs.values()), needs

def malformed(cu_q, cu_k=None):
    for form in ("plain", "add"):
        step = make_step((300,), (2, 1), form=form)
        moved(step, cu_q, cu_q if cu_k is None else cu_k).run()

CASE
torch.cuda.synchronize()
print("done")
"""
# All kernels in all forms: tails of every tile, more blocks than a ring of stages has, segments without queries, keys
# or both, rows without keys, odd groups, destinations hit twice. Few rows: racecheck follows all use of shared memory.
_CASES = {
    "documents": "sanitize((65, 1, 200), (2, 1), 'plain')",
    "windows": "sanitize(((0, 0), (64, 330), (0, 5), (7, 0), (70, 3)), (3, 1), 'window')",
    "rows of a buffer": "sanitize(((40, 90), (33, 130), (0, 9)), (2, 2), 'add')",
    "many tiles": "sanitize(((129, 257), *((1, 2),) * 40), (4, 2), 'window', scale=0.3)",
}
# Where segments lie is no matter of shared memory, and so not of racecheck.
_MALFORMED = """
malformed((0, 200, 100, 250, 300))
malformed((-5, 30, -3, 200, 300))
malformed((0, 80, 1000, 100, 300))
malformed((50, 100, 300))
malformed((0, 80, 100))
malformed((-2147483648, 2147483647, 5, 300))
malformed((400, 500))
malformed(tuple(37 * n % 301 for n in range(40)))
malformed((0, 300, 300, 300), (0, 500, -7, 300))
malformed((0, -9, 500, 300), (0, 300, 300, 300))
"""
# A read of what nobody wrote, and one of the 16 bytes behind an allocation (torch itself makes no such view). That one
# is 32 bytes longer than the operand, so that it ends between the multiples of 256 bytes that allocations begin at: one
# that ends at a multiple may be followed by another at once, and what is read there is no error. gqa_bwd_pre reads the
# last 16 bytes of the last row of the gradient.
_PLANTED = """
import torch
from cake_gqa import varlen_gqa_attention_bwd, varlen_gqa_attention_fwd
q, k, v, dout = (torch.ones(64, 1, 256, dtype=torch.bfloat16).to("cuda") for _ in range(4))
cu = torch.tensor([0, 64], dtype=torch.int32).to("cuda")
longer = torch.ones(64 * 256 + 16, dtype=torch.bfloat16).to("cuda")
class Behind:
    __cuda_array_interface__ = {
        "shape": (64, 1, 256), "typestr": "<i2", "data": (longer.data_ptr() + 48, False), "version": 2
    }
out, lse = varlen_gqa_attention_fwd(q, k, v, cu, cu)
FAULT
assert dout.is_contiguous()
varlen_gqa_attention_bwd(q, k, v, out, lse, dout, cu, cu, max_seqlen_k=64)
torch.cuda.synchronize()
"""
_FAULTS = {
    "memcheck": (
        "dout = torch.as_tensor(Behind(), device='cuda').view(torch.bfloat16)\n"
        "assert dout.data_ptr() + dout.nbytes == longer.data_ptr() + longer.nbytes + 16",
        "Invalid __global__ read of size 16",
    ),
    "initcheck": (
        "dout = torch.empty(64, 1, 256, dtype=torch.bfloat16, device='cuda')",
        "Uninitialized __global__ memory read",
    ),
}


_SCRIPTS = case_scripts(_SANITIZED, _CASES, _MALFORMED, _PLANTED, {tool: fault for tool, (fault, _) in _FAULTS.items()})


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    configure()
    for form in FORMS:
        make_step((5, 3), (2, 1), form=form).to(DEVICE).run()  # all libraries are compiled before
    torch.cuda.synchronize()
    workspace.release_pool()
    torch.cuda.empty_cache()
    # The barriers of a CTA, which are in dynamic shared memory: the compiler's count, the default, may miss them.
    barriers = {"racecheck": ("--num-cuda-barriers", "24")}
    with sanitized_runs(_SCRIPTS, "gqa", ahead=wanted_runs(request), options=barriers) as runs:
        yield runs


@pytest.mark.parametrize("run", [name for name in _SCRIPTS if not name.startswith("planted")])
def test_the_sanitizer_finds_nothing(runs: Runs, run: str) -> None:
    """Every kernel and form; segments of every kind; malformed offsets."""
    assert_clean(runs, run)


@pytest.mark.parametrize("run", [name for name in _SCRIPTS if name.startswith("planted")])
def test_the_sanitizer_finds_a_planted_fault(runs: Runs, run: str) -> None:
    """What the other test relies on."""
    assert_found(runs, run, _FAULTS[run.removeprefix("planted ")][1], "gqa_bwd_pre")
