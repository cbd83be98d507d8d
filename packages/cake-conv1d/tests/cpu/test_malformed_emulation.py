"""documents.cuh by emulation: the document of every token among many offsets, and any offsets are memory-safe."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from cake_conv1d.backends.cuda import _Edge as Edge
from cake_conv1d.testing.steps import well_formed
from cake_core.testing.cuda_on_cpu.emulation import OnFakeDevice, at_the_end_of_readable_memory, randn, survives
from cake_core.testing.gates import assert_same_bits
from conv_emulation import Kernels, int32
from torch import Tensor

TOKENS, CHANNELS = 77, 16
NEVER = torch.iinfo(torch.int32)
MALFORMED = {
    "decreasing": (0, 40, 20, 60, 77),
    "decreasing to the first": (0, 30, 77, 0, 77),
    "negative": (-5, 10, -3, 50, 77),
    "past the end": (0, 20, 100, 60, 77),
    "ends before the last token": (0, 20, 50),
    "ends behind the last token": (0, 20, 90),
    "begins late": (10, 20, 77),
    "all behind": (80, 90, 100),
    "all before": (-9, -4, -1),
    "the largest and smallest numbers": (NEVER.min, NEVER.max, 5, NEVER.min, 30, NEVER.max),
    "all the same": (33,) * 40,
    "a long descent": tuple(range(77, -1, -1)),
    "saw teeth": tuple(17 * n % 78 for n in range(70)),
    "noise": tuple(random.Random(0).randrange(-100, 200) for _ in range(300)),
}


def at_the_beginning_of_readable_memory(values: Tensor) -> Tensor:
    """A copy whose first byte is the first one behind memory that may not be touched."""
    nbytes, guard = values.numel() * values.element_size(), 16 * mmap.PAGESIZE
    raw = torch.frombuffer(mmap.mmap(-1, guard + nbytes), dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.mprotect(raw.data_ptr(), guard, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return raw[guard : guard + nbytes].view(values.dtype).view(values.shape).copy_(values)


EDGES = {"end": at_the_end_of_readable_memory, "beginning": at_the_beginning_of_readable_memory}


class Operands:
    """x, dy, weight and states of N documents; outputs of every kernel."""

    def __init__(self, cu: Sequence[int], place: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        n, halo = len(cu) - 1, 3
        self.cu = place(int32(cu))
        self.x, self.dy = (place(randn(TOKENS, CHANNELS, seed=seed)) for seed in (1, 2))
        self.w = place(randn(CHANNELS, 4, seed=3))
        self.state, self.d_final = (place(randn(n, halo, CHANNELS, seed=seed)) for seed in (4, 5))
        self.y, self.dx = (place(torch.zeros(TOKENS, CHANNELS).bfloat16()) for _ in range(2))
        self.final, self.d_initial = (place(torch.zeros(n * halo, CHANNELS).bfloat16()) for _ in range(2))
        self.dw, self.partial = place(torch.zeros(CHANNELS, 4)), place(torch.zeros(4, 4 * CHANNELS))
        self.send = place(torch.zeros(n * halo, CHANNELS))
        # Each head row to a slot of its own; tails read the same rows; the history is every document's own.
        own = torch.arange(n * halo, dtype=torch.int32).view(n, halo)
        self.table = place(own)
        self.slots = place(
            torch.full((n, halo, halo), -1, dtype=torch.int32).index_copy_(2, torch.tensor([1]), own[..., None])
        )

    def passes(self, kernels: Kernels, states: bool = True, tables: bool = False) -> None:
        state, d_final = (self.state.view(-1, CHANNELS), self.d_final.view(-1, CHANNELS)) if states else (None, None)
        table = self.table if tables else None
        kernels.fwd.run(self.y, self.x, self.w, self.cu, 0, state, table, table, 1)
        operands = (self.dy, self.x, self.w, self.cu, 0, state, table, d_final, table)
        kernels.bwd.run(self.dx, self.dw, self.partial, *operands, 1, 1, 4, 4)

    def edges(self, kernels: Kernels) -> None:
        x, w, cu, dy = self.x, self.w, self.cu, self.dy
        state = {"state": self.state}
        kernels.edge(Edge.FINAL_STATE, self.final, x, None, cu, **state)
        read = self.d_final.view(-1, CHANNELS)
        kernels.edge(Edge.INITIAL_GRADIENT, self.d_initial, x, w, cu, dy=dy, read=read, **state)
        kernels.edge(Edge.HEAD_FORWARD, self.y, x, w, cu, history_table=self.table, **state)
        kernels.edge(Edge.HEAD_GRADIENT, self.send, x, w, cu, dy=dy, table=self.slots, **state)
        kernels.edge(Edge.TAIL_GRADIENT, self.dx, x, w, cu, dy=dy, read=self.send, table=self.table, **state)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", MALFORMED)
def test_no_offsets_lead_a_kernel_outside_of_its_operands(kernels: Kernels, name: str, edge: str) -> None:
    """Operands and outputs lie at the end of readable memory, or at its beginning."""
    operands = Operands(MALFORMED[name], EDGES[edge])
    assert survives(lambda: (operands.passes(kernels), operands.edges(kernels)))
    assert survives(lambda: operands.passes(kernels, states=False))
    assert survives(lambda: operands.passes(kernels, tables=True))


def test_a_read_outside_would_be_seen(kernels: Kernels) -> None:
    """What the test above relies on: more offsets than there are, and a row before the first one."""
    operands = Operands((0, 20, 77), at_the_end_of_readable_memory)
    operands.cu = operands.cu.as_strided((1025,), (1,))
    assert not survives(lambda: operands.passes(kernels, states=False))
    operands = Operands((0, 20, 77), at_the_beginning_of_readable_memory)
    before = OnFakeDevice(operands.x[0:1])
    before.managed.tensor.data -= 2 * CHANNELS
    y, row = torch.empty(1, CHANNELS).bfloat16(), kernels.fwd.from_dlpack(before)
    assert not survives(lambda: kernels.fwd.run(y, row, operands.w, None, 1, None, None, None, 1))


@pytest.mark.parametrize("name", MALFORMED)
def test_every_token_is_written_whatever_the_offsets_are(kernels: Kernels, name: str) -> None:
    operands = Operands(MALFORMED[name])
    for output in (operands.y, operands.dx):
        output.fill_(torch.nan)
    operands.passes(kernels)
    for name_of, output in (("y", operands.y), ("dx", operands.dx), ("dweight", operands.dw)):
        assert bool(output.isfinite().all()), name_of


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("name", [*MALFORMED, "mostly right"])
def test_well_formed_documents_keep_their_bits(kernels: Kernels, name: str, states: bool) -> None:
    """Junk in other offsets changes nothing in them, forward, backward and states."""
    cu = MALFORMED.get(name, (0, 7, 5, 3, 7, 9, 12, 40, 40, 200, 44, 60, 77))
    operands = Operands(cu)
    operands.passes(kernels, states)
    for n, start, end in well_formed(cu, TOKENS):
        x, dy = operands.x[start:end].clone(), operands.dy[start:end].clone()
        own = operands.state[n : n + 1] if states else None
        last = operands.d_final[n : n + 1] if states else None
        assert_same_bits(operands.y[start:end], kernels.forward(x, operands.w, state=own), f"y of document {n}")
        dx, _ = kernels.backward(dy, x, operands.w, state=own, d_final=last)
        assert dx is not None
        assert_same_bits(operands.dx[start:end], dx, f"dx of document {n}")


def test_what_counts_as_well_formed() -> None:
    assert [n for n, _, _ in well_formed((0, 7, 5, 3, 7, 9, 12, 40, 40, 200, 44, 60, 77), TOKENS)] == [4, 5, 6]
    assert well_formed(MALFORMED["decreasing"], TOKENS) == [(3, 60, 77)]
    assert well_formed(MALFORMED["ends before the last token"], TOKENS) == [(0, 0, 20), (1, 20, 50)]
    assert well_formed(MALFORMED["begins late"], TOKENS) == [(0, 10, 20), (1, 20, 77)]


def test_tokens_outside_of_the_offsets_are_documents_without_history(kernels: Kernels) -> None:
    """Before the first offset and from the last one on; the states belong to the documents between them."""
    operands = Operands((10, 20, 50))
    operands.passes(kernels)
    cu = int32((0, 10, 20, 50, TOKENS))
    none = torch.zeros(1, 3, CHANNELS).bfloat16()
    state, d_final = torch.cat((none, operands.state, none)), torch.cat((none, operands.d_final, none))
    assert_same_bits(operands.y, kernels.forward(operands.x, operands.w, cu, state=state), "y")
    # A gradient of zero is added where there is a document: -0 + 0 is +0.
    dx, _ = kernels.backward(operands.dy, operands.x, operands.w, cu, state=state, d_final=d_final)
    assert dx is not None
    assert bool((operands.dx == dx).all())


COUNTS = (1, 2, 28, 29, 30, 31, 32, 33, 62, 63, 64, 991, 992, 993, 1023, 1024, 1025, 3000)


def _layout(kind: str, count: int) -> list[int]:
    """Offsets of ``count`` documents with ``TOKENS`` tokens, most of them empty."""
    draw = random.Random(count)
    if kind == "all in the first":
        return [0] + [TOKENS] * count
    if kind == "all in the last":
        return [0] * count + [TOKENS]
    if kind == "all in the middle":
        return [0] * (count // 2 + 1) + [TOKENS] * (count - count // 2)
    if kind == "few":
        inner = sorted(draw.choice((0, 1, 2, 30, 31, 60, 76, 77)) for _ in range(count - 1))
    else:
        inner = sorted(draw.randrange(TOKENS + 1) for _ in range(count - 1))
    return [0, *inner, TOKENS]


@pytest.mark.parametrize("kind", ["all in the first", "all in the last", "all in the middle", "few", "spread"])
@pytest.mark.parametrize("count", COUNTS)
def test_the_search_finds_each_document_among_empty_ones(kernels: Kernels, kind: str, count: int) -> None:
    """The states tell which document a token was found in: each has rows of its own. The same bits as the documents
    with tokens alone. The offsets end where memory ends."""
    cu = _layout(kind, count)
    kept = [n for n in range(count) if cu[n] < cu[n + 1]]
    x, dy, w = randn(TOKENS, 8, seed=1), randn(TOKENS, 8, seed=2), randn(8, 4, seed=3)
    state, d_final = randn(count, 3, 8, seed=4), randn(count, 3, 8, seed=5)
    offsets, few = at_the_end_of_readable_memory(int32(cu)), int32([0, *(cu[n + 1] for n in kept)])
    assert survives(lambda: kernels.forward(x, w, offsets, state=state))
    y = kernels.forward(x, w, offsets, state=state)
    assert_same_bits(y, kernels.forward(x, w, few, state=state[kept]), "y")
    dx, dw = kernels.backward(dy, x, w, offsets, state=state, d_final=d_final)
    want = kernels.backward(dy, x, w, few, state=state[kept], d_final=d_final[kept])
    for name, got, wanted in zip(("dx", "dweight"), (dx, dw), want, strict=True):
        assert got is not None
        assert wanted is not None
        assert_same_bits(got, wanted, name)
