"""The Hopper kernels of ``gqa`` lane by lane on the CPU: one call each, with results in poisoned memory."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cake_gqa
import torch
from cake_core.testing.cuda_on_cpu.emulation import Program, compile_program
from cake_core.testing.gates import assert_guards, poisoned_empty
from cake_gqa import plan
from cake_gqa.testing.steps import Step
from torch import Tensor

CSRC = Path(cake_gqa.__file__).parent / "kernels" / "csrc"
PROGRAMS = ("gqa_plan", "gqa_fwd", "gqa_bwd_pre", "gqa_bwd_dkv", "gqa_bwd_dq", "gqa_rowmap_add")
WIDTH = 256
BF16, FP32 = torch.bfloat16, torch.float32


def compiled(folder: Path) -> dict[str, Program]:
    """All libraries, compiled for the CPU into ``folder``."""
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda name: compile_program(CSRC, name, folder), PROGRAMS))
    return {path.stem: Program(path) for path in paths}


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return poisoned_empty(shape, dtype, "cpu")


def is_poison(values: Tensor) -> bool:
    """Whether every byte is as ``poisoned`` left it."""
    return bool(values.contiguous().view(torch.uint8).eq(0xFF).all())


class Kernels:
    """One call each of the libraries, on the operands of a step. The guards around results are checked behind it."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self.programs = programs

    def shuffle_lanes(self, seed: int) -> None:
        for program in self.programs.values():
            program.shuffle_lanes(seed)

    def table(self, step: Step) -> Tensor:
        table = poisoned(plan.plan_bytes(len(step.cu_q) - 1), dtype=torch.uint8)
        self.programs["gqa_plan"].run(table, step.cu_q, step.cu_k, step.q.shape[0], step.k.shape[0])
        assert_guards(table, "table")
        return table

    def forward(self, step: Step) -> tuple[Tensor, Tensor]:
        """(out, lse)"""
        out, lse = poisoned(*step.q.shape), poisoned(step.q.shape[1], step.q.shape[0], dtype=FP32)
        operands = (step.q, step.k, step.v, self.table(step), step.cu_q, step.cu_k, scale_of(step))
        self.programs["gqa_fwd"].run(out, lse, *operands)
        for name, value in (("out", out), ("lse", lse)):
            assert_guards(value, name)
        return out, lse

    def statistics(self, step: Step, out: Tensor, lse: Tensor) -> Tensor:
        """Raw bytes of FP32 [2, H_q, R]."""
        stats = poisoned(plan.stats_bytes(*step.q.shape[:2], len(step.cu_q) - 1), dtype=torch.uint8)
        self.programs["gqa_bwd_pre"].run(stats, out, step.dout, lse, step.cu_q)
        assert_guards(stats, "stats")
        return stats

    def query_gradient(self, step: Step, stats: Tensor) -> Tensor:
        dq = poisoned(*step.q.shape)
        self.programs["gqa_bwd_dq"].run(dq, *self._operands(step, stats))
        assert_guards(dq, "dq")
        return dq

    def key_gradients(self, step: Step, stats: Tensor, *, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
        """(dk, dv)"""
        dk, dv = (poisoned(*step.k.shape, dtype=dtype) for _ in range(2))
        self.programs["gqa_bwd_dkv"].run(dk, dv, None, *self._operands(step, stats), 0, step.k.shape[1], 0)
        for name, value in (("dk", dk), ("dv", dv)):
            assert_guards(value, name)
        return dk, dv

    def windows(self, step: Step, stats: Tensor, first: int, heads: int) -> Tensor:
        """FP32 [2, T_k, heads, 256] of some key heads."""
        raw = poisoned(8 * WIDTH * step.k.shape[0] * heads, dtype=torch.uint8)
        self.programs["gqa_bwd_dkv"].run(None, None, raw, *self._operands(step, stats), first, heads, first)
        assert_guards(raw, "window")
        return raw.view(FP32).view(2, step.k.shape[0], heads, WIDTH)

    def add(self, step: Step, dk: Tensor, dv: Tensor, window: Tensor, links: Tensor, first: int = 0) -> None:
        """``window`` of ``windows`` to the mapped rows of dk and dv [N, H_kv, 256], in place."""
        raw, (heads,) = window.flatten().view(torch.uint8), window.shape[2:3]
        operands = (raw, links, step.row_map, step.cu_q, step.cu_k, step.q.shape[0], first, heads)
        self.programs["gqa_rowmap_add"].run(dk, dv, *operands)
        assert_guards(links, "links")

    def step(self, step: Step) -> dict[str, Tensor]:
        """Forward and backward with BF16 gradients."""
        out, lse = self.forward(step)
        stats = self.statistics(step, out, lse)
        dk, dv = self.key_gradients(step, stats)
        return {"out": out, "lse": lse, "dq": self.query_gradient(step, stats), "dk": dk, "dv": dv}

    def _operands(self, step: Step, stats: Tensor) -> tuple[object, ...]:
        table = self.table(step)
        return step.q, step.k, step.v, step.dout, stats, table, step.cu_q, step.cu_k, scale_of(step)


def scale_of(step: Step) -> float:
    return WIDTH**-0.5 if step.scale is None else step.scale
