"""Both norms' kernels on operands of the ``test_*_emulation.py`` files, and dweight in its documented order."""

from __future__ import annotations

from pathlib import Path

import cake_norms
import torch
from cake_core.testing.cuda_on_cpu.emulation import Program, fma_chain, fp64_then_phases
from cake_core.testing.gates import assert_guards, poisoned_empty
from cake_norms.gated_rmsnorm import plan as gated_plan
from cake_norms.rmsnorm import plan
from torch import Tensor

EPS = 1e-6
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def csrc(op: str) -> Path:
    """The folder of the kernels of ``op``."""
    return Path(cake_norms.__file__).parent / op / "kernels" / "csrc"


def forward(program: Program, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    row = plan.lanes(x.shape[1])
    y = poisoned_empty(x.shape, torch.bfloat16, "cpu")
    rstd = poisoned_empty(x.shape[:1], torch.float32, "cpu")
    program.run(y, rstd, x, w, EPS, row.vectors, row.threads_per_row)
    assert_guards(y, "y")
    assert_guards(rstd, "rstd")
    return y, rstd


def backward(
    program: Program,
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    rstd: Tensor,
    needs: tuple[bool, bool] = (True, True),
    dweight_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    rows, hidden = x.shape
    p = plan.plan_backward(rows, hidden)
    dx = poisoned_empty(x.shape, torch.bfloat16, "cpu") if needs[0] else None
    dw = poisoned_empty((hidden,), dweight_dtype or w.dtype, "cpu") if needs[1] else None
    scratch = poisoned_empty((p.partial_rows, hidden), torch.float32, "cpu")
    partial = scratch if needs[1] and p.partial_rows > 1 else None
    program.run(dx, dw, partial, dy, x, w, rstd, p.vectors, p.threads_per_row, p.row_groups, p.partial_rows, p.waves)
    for name, output in (("dx", dx), ("dweight", dw), ("partial", partial)):
        if output is not None:
            assert_guards(output, name)
    return dx, dw


def dweight_in_order(a: Tensor, n: Tensor, partial_rows: int, waves: int, groups: int, unroll: int = 1) -> Tensor:
    """FP32 dweight of the terms a n, [rows, columns] each, in the documented order."""
    rows, ctas = len(a), partial_rows // waves
    partial = torch.zeros(partial_rows, a.shape[1])
    for cta in range(partial_rows):
        wave, place = divmod(cta, ctas)
        first, end = wave * rows // waves, (wave + 1) * rows // waves
        joined = torch.zeros(a.shape[1], dtype=torch.float64)
        for group in range(groups):
            starts = range(first + place * unroll * groups, end, ctas * unroll * groups)
            mine = [row for start in starts for u in range(unroll) if (row := start + u * groups + group) < end]
            joined += fma_chain(a[mine], n[mine]).double()
        partial[cta] = joined.float()
    return fp64_then_phases(partial)


def gate_backward(
    program: Program,
    dy: Tensor,
    x: Tensor,
    z: Tensor,
    w: Tensor,
    activation: int,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> dict[str, Tensor | None]:
    tokens, heads, dim = x.shape
    p = gated_plan.plan_backward(tokens * heads, dim)
    dx, dz = (poisoned_empty(x.shape, torch.bfloat16, "cpu") if need else None for need in needs[:2])
    dw = poisoned_empty((dim,), w.dtype, "cpu") if needs[2] else None
    scratch = poisoned_empty((p.partial_rows, dim), torch.float32, "cpu")
    partial = scratch if needs[2] and p.partial_rows > 1 else None
    program.run(dx, dz, dw, partial, dy, x, z, w, EPS, activation, p.partial_rows, p.waves)
    outputs = {"dx": dx, "dz": dz, "dweight": dw}
    for name, output in outputs.items():
        if output is not None:
            assert_guards(output, name)
    return outputs
