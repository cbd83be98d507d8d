"""The Hopper kernels of ``gdn`` lane by lane on the CPU, one after another as a forward and a backward run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import cake_gdn
import torch
from cake_core.testing.cuda_on_cpu.emulation import Program, compile_program
from cake_core.testing.gates import assert_guards, poisoned_empty
from cake_gdn.testing import oracle
from cake_gdn.testing.steps import Step
from torch import Tensor

CSRC = Path(cake_gdn.__file__).parent / "kernels" / "csrc"
PROGRAMS = ("gdn_prep", "gdn_state_scan", "gdn_adjoint_scan", "gdn_tail")
CHUNK, WIDTH = 64, 128
FEW = 66
"""Segments times heads up to which a head's columns are given to two CTAs (kFew)."""

TAIL_CTAS = 132
"""At most: tiles of the tail are dealt out to so many CTAs (kCtas)."""

Empty = Callable[[Sequence[int], torch.dtype], Tensor]
BF16, FP32 = torch.bfloat16, torch.float32


def compiled(folder: Path) -> dict[str, Program]:
    """The four libraries, compiled for the CPU into ``folder``."""
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda name: compile_program(CSRC, name, folder), reversed(PROGRAMS)))
    return {path.stem: Program(path) for path in paths}


# --- tables -----------------------------------------------------------------------------------------------------


def int32(rows: Sequence[Sequence[int]], columns: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, columns)


def chunk_table(cu: Sequence[int]) -> Tensor:
    """[chunks, 2]: first token, tokens."""
    spans = pairwise(cu)
    return int32([(t, min(CHUNK, end - t)) for start, end in spans for t in range(start, end, CHUNK)], 2)


def segment_table(cu: Sequence[int], entering: bool = True, leaving: bool = True) -> Tensor:
    """[documents that have tokens, 5], longest first: first token, tokens, first chunk, rows of the two states."""
    rows: list[tuple[int, ...]] = []
    chunk = 0
    for n, (start, end) in enumerate(pairwise(cu)):
        if end > start:
            rows.append((start, end - start, chunk, n if entering else -1, n if leaving else -1))
        chunk += -(-(end - start) // CHUNK)
    return int32(sorted(rows, key=lambda row: -row[1]), 5)


def many(segments: Tensor, heads: int) -> Tensor:
    """The same walks among so many entries, the others of which stand for nothing, that no head is cut in two."""
    count = max(len(segments), FEW // heads + 1)
    return torch.cat([segments, segments.new_zeros(count - len(segments), 5)])


# --- operands and results ----------------------------------------------------------------------------------------


# Column of an element in a row of 64 that is swizzled, which exchanges pairs: its own inverse. [128, 64]
SWIZZLE = torch.arange(64) ^ 8 * (torch.arange(WIDTH) % 8)[:, None]


def untiled(tape: Tensor) -> Tensor:
    """States [.., 128 values, 128 keys] of a tape, which holds them as shared memory does: keys 0-63, then 64-127."""
    tiles = tape.flatten(-2).unflatten(-1, (2, WIDTH, 64))
    return tiles.gather(-1, SWIZZLE.expand(tiles.shape)).transpose(-3, -2).reshape(tape.shape)


def tiled(states: Tensor) -> Tensor:
    """The tape of ``states``."""
    tiles = states.unflatten(-1, (2, 64)).transpose(-3, -2)
    return tiles.gather(-1, SWIZZLE.expand(tiles.shape)).reshape(states.shape)


@dataclass(frozen=True)
class Operands:
    """A step as the kernels take it: packed rows, K-first states in any layout."""

    q: Tensor
    """[T, H, 128], as k."""
    k: Tensor
    v: Tensor
    """[T, HV, 128], as do."""
    g: Tensor
    """[T, HV], as beta."""
    beta: Tensor
    do: Tensor
    cu: tuple[int, ...]
    state: Tensor | None
    """[N, HV, 128 (K), 128 (V)], as dht."""
    dht: Tensor | None
    norm: bool
    scale: float
    v_first: bool
    """Of the states that the kernels write."""


def operands(step: Step) -> Operands:
    assert step.do is not None
    tokens = (t.flatten(0, 1) for t in (step.q, step.k, step.v, step.g, step.beta, step.do))
    states = (None if t is None else t.mT if step.v_first else t for t in (step.state, step.dht))
    scale = WIDTH**-0.5 if step.scale is None else step.scale
    cu = tuple(oracle.offsets(step.cu, step.q.shape[0], step.q.shape[1]))
    return Operands(*tokens, cu, *states, step.norm, scale, step.v_first)


@dataclass(frozen=True)
class Results:
    """All that the kernels write; a forward leaves the second half empty."""

    z: Tensor
    """[T, HV, 64]"""
    r_q: Tensor | None
    """[T, H], as r_k."""
    r_k: Tensor | None
    o: Tensor | None
    """[T, HV, 128]"""
    e: Tensor | None
    S: Tensor | None
    """[chunks, HV, 128 (V), 128 (K)], the state before each chunk."""
    final_state: Tensor
    """[N, HV, 128 (K), 128 (V)]"""
    dv: Tensor | None = None
    E: Tensor | None = None
    dS: Tensor | None = None
    dh0: Tensor | None = None
    dq: Tensor | None = None
    """[T, H, 128], as dk."""
    dk: Tensor | None = None
    dg: Tensor | None = None
    """[T, HV], as dbeta."""
    dbeta: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        value = getattr(self, name)
        assert isinstance(value, Tensor), name
        return value

    def rows(self, rows: slice, chunks: slice, documents: slice) -> dict[str, Tensor]:
        """Everything of some tokens, chunks and documents."""
        of = {"S": chunks, "dS": chunks, "final_state": documents, "dh0": documents}
        return {name: t[of.get(name, rows)] for name, t in vars(self).items() if t is not None}


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return poisoned_empty(shape, dtype, "cpu")


def is_poison(values: Tensor) -> bool:
    """Whether every byte is as ``poisoned`` left it."""
    return bool(values.contiguous().view(torch.uint8).eq(0xFF).all())


class Kernels:
    """One call each of the four libraries.

    Args:
        empty: where results lie; unless told, poisoned, and the guards around them are checked behind each call.
    """

    def __init__(self, programs: Mapping[str, Program], empty: Empty = poisoned) -> None:
        self.programs = {name: programs[name] for name in PROGRAMS}
        self.empty = empty

    def shuffle_lanes(self, seed: int) -> None:
        for program in self.programs.values():
            program.shuffle_lanes(seed)

    def prep(
        self, q: Tensor, k: Tensor, beta: Tensor, chunks: Tensor, norm: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(z, r_q, r_k)"""
        tokens, heads = q.shape[:2]
        z = self.empty((tokens, beta.shape[1], CHUNK), BF16)
        r_q, r_k = (self.empty((tokens, heads), FP32) if norm else None for _ in range(2))
        self.programs["gdn_prep"].run(z, r_q, r_k, q, k, beta, chunks)
        self._check(z=z, r_q=r_q, r_k=r_k)
        return z, r_q, r_k

    def state_scan(
        self,
        x: Operands,
        z: Tensor,
        r_q: Tensor | None,
        r_k: Tensor | None,
        segments: Tensor,
        *,
        output: bool = True,
        tapes: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """(o, e, S, final states)"""
        o, e = (self.empty(x.v.shape, BF16) if wanted else None for wanted in (output, tapes))
        S = self._tape(x) if tapes else None
        final, written = self._states(x)
        operands = (x.q, x.k, x.v, x.g, x.beta, r_q, r_k, z, x.state, segments, x.scale)
        self.programs["gdn_state_scan"].run(o, e, S, final, *operands)
        self._check(o=o, e=e, S=S, final_state=written)
        return o, e, None if S is None else untiled(S), final

    def adjoint_scan(
        self,
        x: Operands,
        z: Tensor,
        r_q: Tensor | None,
        r_k: Tensor | None,
        segments: Tensor,
        *,
        dv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(dv, E, dS, dh0)"""
        if dv is None:
            dv = self.empty(x.v.shape, BF16)
        E, dS = self.empty(x.v.shape, BF16), self._tape(x)
        dh0, written = self._states(x)
        operands = (x.q, x.k, x.do, x.g, x.beta, r_q, r_k, z, x.dht, segments, x.scale)
        self.programs["gdn_adjoint_scan"].run(dv, E, dS, dh0, *operands)
        self._check(E=E, dS=dS, dh0=written, dv=dv if dv.is_contiguous() else None)
        return dv, E, untiled(dS), dh0

    def tail(
        self,
        x: Operands,
        r_q: Tensor | None,
        r_k: Tensor | None,
        tapes: tuple[Tensor, Tensor, Tensor, Tensor],
        chunks: Tensor,
        *,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(dq, dk, dg, dbeta); ``tapes``: e, E, S, dS."""
        dq, dk = (self.empty(x.q.shape, BF16) if t is None else t for t in (dq, dk))
        dg, dbeta = self.empty(x.g.shape, FP32), self.empty(x.g.shape, x.beta.dtype)
        e, E, S, dS = tapes
        operands = (x.q, x.k, x.do, x.g, x.beta, r_q, r_k, e, E, tiled(S), tiled(dS), chunks, x.scale)
        self.programs["gdn_tail"].run(dq, dk, dg, dbeta, *operands)
        dense = {name: t for name, t in (("dq", dq), ("dk", dk)) if t.is_contiguous()}
        self._check(dg=dg, dbeta=dbeta, **dense)
        return dq, dk, dg, dbeta

    def step(self, x: Operands, *, wide: bool = False, backward: bool = True) -> Results:
        """Forward with tapes and backward.

        Args:
            wide: scans with two walking warpgroups, also where the launcher would choose one.
        """
        chunks = chunk_table(x.cu)
        tables = [segment_table(x.cu, entering=x.state is not None), segment_table(x.cu, leaving=x.dht is not None)]
        if wide:
            tables = [many(table, x.v.shape[1]) for table in tables]
        z, r_q, r_k = self.prep(x.q, x.k, x.beta, chunks, x.norm)
        o, e, S, final = self.state_scan(x, z, r_q, r_k, tables[0])
        forward = Results(z, r_q, r_k, o, e, S, final)
        if not backward:
            return forward
        dv, E, dS, dh0 = self.adjoint_scan(x, z, r_q, r_k, tables[1])
        dq, dk, dg, dbeta = self.tail(x, r_q, r_k, (forward["e"], E, forward["S"], dS), chunks)
        return replace(forward, dv=dv, E=E, dS=dS, dh0=dh0, dq=dq, dk=dk, dg=dg, dbeta=dbeta)

    def _tape(self, x: Operands) -> Tensor:
        return self.empty((len(chunk_table(x.cu)), x.v.shape[1], WIDTH, WIDTH), BF16)

    def _states(self, x: Operands) -> tuple[Tensor, Tensor]:
        """States to write, K first, and the memory that they lie in."""
        memory = self.empty((len(x.cu) - 1, x.v.shape[1], WIDTH, WIDTH), FP32)
        return memory.mT if x.v_first else memory, memory

    def _check(self, **written: Tensor | None) -> None:
        for name, value in written.items() if self.empty is poisoned else ():
            if value is not None:
                assert_guards(value, name)
