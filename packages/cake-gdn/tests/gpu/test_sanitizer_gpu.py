"""compute-sanitizer over every kernel of ``gdn``, malformed offsets among its operands: one short run a tool and case.
Needs a GPU and the tool."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from cake_core import configure, workspace
from cake_core.testing.sanitizer import (
    Runs,
    assert_clean,
    assert_found,
    case_scripts,
    sanitized_runs,
    version,
    wanted_runs,
)
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
from cake_core.testing.sanitizer import edge
from cake_gdn.testing.steps import make_step

DEVICE = "cuda"

def moved(step, cu=None):
    pads = {"q": 8, "k": 16, "v": 8, "do": 24}
    rows = {name: edge(getattr(step, name)[0], pad, DEVICE)[None] for name, pad in pads.items()}
    step = replace(step, cu=step.cu if cu is None else torch.tensor(cu, dtype=torch.int32))
    return replace(step.to(DEVICE), **rows)

def sanitize(lengths, heads, host=False, **options):
    # All saved sets: of "none" the forward keeps no tape, and the backward scans without an output.
    step = moved(make_step(lengths, heads, **options))
    given = {"cu_seqlens": None, "cu_seqlens_cpu": (0, *accumulate(lengths))} if host else {}
    for save in ("full", "none"):
        outputs = step.run(save=save, **given)
        assert all(bool(value.cpu().isfinite().all()) for value in outputs.values()), save

def malformed(*offsets):
    moved(make_step((300,) + (0,) * (len(offsets) - 2), (1, 2), state=True), offsets).run()

CASE
torch.cuda.synchronize()
print("done")
"""
# All five kernels and all instances of the scans: 64 value columns a CTA, and 128 (more than 66 segments times heads;
# empty documents are segments, too, where the device alone knows them); stages that come again (more than three
# chunks); 1 to 3 value heads of a key head; states; padding. Few tokens: racecheck follows all use of shared memory.
_CASES = {
    "states": "sanitize((65, 0, 1, 257), (1, 2), state=True)",
    "three heads of a group": "sanitize((130,), (1, 3), host=True, norm=False, beta='bfloat16')",
    "many segments": "sanitize((193, 1, *(0,) * 33), (1, 2), state=True, v_first=True, padding=3)",
    "two key heads": "sanitize((40, 24), (2, 2), host=True, gates='qwen-16')",
}
# Where documents lie is no matter of shared memory, and so not of racecheck.
_MALFORMED = """
malformed(0, 200, 100, 250, 300)
malformed(-5, 30, -3, 200, 300)
malformed(0, 80, 1000, 100, 300)
malformed(50, 100, 300)
malformed(-2147483648, 2147483647, 5, 300)
malformed(400, 500)
malformed(*(37 * n % 301 for n in range(40)))
"""
# A read of what nobody wrote, and one of the 16 bytes behind an allocation (torch itself makes no such view). That one
# is 32 bytes longer than the operand, so that it ends between the multiples of 256 bytes that allocations begin at: one
# that ends at a multiple may be followed by another at once, and what is read there is no error. gdn_prep reads the
# last 16 bytes of the last row, for the norm of q.
_PLANTED = """
import torch
from cake_gdn import chunk_gated_delta_rule_fwd
k, v = (torch.ones(1, 64, 1, 128, dtype=torch.bfloat16).to("cuda") for _ in range(2))
g, beta = (torch.zeros(1, 64, 1).to("cuda") for _ in range(2))
longer = torch.ones(64 * 128 + 16, dtype=torch.bfloat16).to("cuda")
class Behind:
    __cuda_array_interface__ = {
        "shape": (1, 64, 1, 128), "typestr": "<i2", "data": (longer.data_ptr() + 48, False), "version": 2
    }
FAULT
assert q.is_contiguous()
chunk_gated_delta_rule_fwd(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
torch.cuda.synchronize()
"""
_FAULTS = {
    "memcheck": (
        "q = torch.as_tensor(Behind(), device='cuda').view(torch.bfloat16)\n"
        "assert q.data_ptr() + q.nbytes == longer.data_ptr() + longer.nbytes + 16",
        "Invalid __global__ read of size 16",
    ),
    "initcheck": (
        "q = torch.empty(1, 64, 1, 128, dtype=torch.bfloat16, device='cuda')",
        "Uninitialized __global__ memory read",
    ),
}


_SCRIPTS = case_scripts(_SANITIZED, _CASES, _MALFORMED, _PLANTED, {tool: fault for tool, (fault, _) in _FAULTS.items()})
# Older ones report what bar.arrive orders, which the tail does, as races; its release notes tell when that was mended.
_FOLLOWS_THE_TAIL = (2026, 1)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    configure()
    make_step((5, 3), (1, 2), state=True).to(DEVICE).run()  # all five libraries are compiled before
    torch.cuda.synchronize()
    workspace.release_pool()
    torch.cuda.empty_cache()
    # At least the barriers of a CTA (the tail has 11), which are in dynamic shared memory: the compiler's count, the
    # default, may miss them.
    options = ["--num-cuda-barriers", "16"]
    if version() < _FOLLOWS_THE_TAIL:
        options += ["--kernel-name-exclude", "kns=gdn_tail"]
    with sanitized_runs(_SCRIPTS, "gdn", ahead=wanted_runs(request), options={"racecheck": tuple(options)}) as runs:
        yield runs


@pytest.mark.parametrize("run", [name for name in _SCRIPTS if not name.startswith("planted")])
def test_the_sanitizer_finds_nothing(runs: Runs, run: str) -> None:
    """Every kernel and instance of it; documents of every kind; malformed offsets."""
    assert_clean(runs, run)


def test_racecheck_follows_every_kernel() -> None:
    if version() < _FOLLOWS_THE_TAIL:
        pytest.skip(f"compute-sanitizer {version()} does not follow gdn_tail; needs 2026.1: nvidia-cuda-sanitizer-api")


@pytest.mark.parametrize("run", [name for name in _SCRIPTS if name.startswith("planted")])
def test_the_sanitizer_finds_a_planted_fault(runs: Runs, run: str) -> None:
    """What the other test relies on."""
    assert_found(runs, run, _FAULTS[run.removeprefix("planted ")][1], "gdn_prep")
