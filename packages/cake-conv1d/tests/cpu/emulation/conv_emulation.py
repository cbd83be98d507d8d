"""The CUDA kernels of ``conv1d`` lane by lane on the CPU, called as backends/cuda.py calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import cake_conv1d
import torch
from cake_conv1d import plan
from cake_conv1d.backends.cuda import _Edge as Edge
from cake_core.testing.cuda_on_cpu.emulation import Program
from cake_core.testing.gates import assert_guards, poisoned_empty
from torch import Tensor

CSRC = Path(cake_conv1d.__file__).parent / "kernels" / "csrc"
PROGRAMS = tuple(f"conv1d_{name}" for name in plan.PROGRAMS)


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_of(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.reshape(-1, state.shape[-1])


class Kernels:
    """One call each of the three libraries; outputs are poisoned before and their guards checked behind."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self.fwd, self.bwd, self.halo = (programs[name] for name in PROGRAMS)

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        cu: Tensor | None = None,
        *,
        length: int | None = None,
        state: Tensor | None = None,
        table: Tensor | None = None,
        skip: Tensor | None = None,
        silu: bool = True,
        y: Tensor | None = None,
    ) -> Tensor:
        fresh = y is None
        out = poisoned_empty(x.shape, torch.bfloat16, "cpu") if y is None else y
        self.fwd.run(out, x, w, cu, _length(x, cu, length), rows_of(state), table, skip, int(silu))
        if fresh:
            assert_guards(out, "y")
        return out

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        cu: Tensor | None = None,
        *,
        length: int | None = None,
        state: Tensor | None = None,
        table: Tensor | None = None,
        d_final: Tensor | None = None,
        skip: Tensor | None = None,
        silu: bool = True,
        policy: str = "bf16",
        needs: tuple[bool, bool] = (True, True),
        dweight: torch.dtype | None = None,
        partition: tuple[int, int] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        p = plan.plan_backward(*x.shape)
        blocks, partial_rows = partition or (p.blocks, p.partial_rows)
        dx = poisoned_empty(x.shape, torch.bfloat16, "cpu") if needs[0] else None
        dw = poisoned_empty(w.shape, dweight or w.dtype, "cpu") if needs[1] else None
        scratch = poisoned_empty((partial_rows, w.numel()), torch.float32, "cpu")
        partial = scratch if needs[1] and partial_rows > 1 else None
        before = rows_of(state), table
        call = int(silu), int(policy == "bf16"), blocks, partial_rows
        self.bwd.run(dx, dw, partial, dy, x, w, cu, _length(x, cu, length), *before, rows_of(d_final), skip, *call)
        for name, output in (("dx", dx), ("dweight", dw), ("partial", partial)):
            if output is not None:
                assert_guards(output, name)
        return dx, dw

    def edge(
        self,
        edge: Edge,
        out: Tensor,
        x: Tensor,
        w: Tensor | None = None,
        cu: Tensor | None = None,
        *,
        dy: Tensor | None = None,
        read: Tensor | None = None,
        table: Tensor | None = None,
        length: int | None = None,
        state: Tensor | None = None,
        history_table: Tensor | None = None,
        silu: bool = True,
        policy: str = "bf16",
    ) -> Tensor:
        before = rows_of(state), history_table
        how = int(silu), int(policy == "bf16")
        self.halo.run(int(edge), out, x, w, dy, read, table, cu, _length(x, cu, length), *before, *how)
        return out


def _length(x: Tensor, cu: Tensor | None, length: int | None) -> int:
    return 0 if cu is not None else x.shape[0] if length is None else length
