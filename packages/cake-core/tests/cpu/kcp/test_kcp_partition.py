"""How a packed batch is cut: every token once, near-equal, in the order that the layout says; scatter and gather."""

from __future__ import annotations

import ast
import importlib.util
import random
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cake_core import kcp
from cake_core.kcp import KcpPartition, gather_kcp, halo_plan, partition_kcp, scatter_kcp
from cake_core.testing.fake_cuda import FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12)
ranks = st.integers(1, 8)


def offsets(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def dealt(tokens: list[Any], pieces: int) -> list[list[Any]]:
    """The definition of near_equal, token by token: piece i has n // m + (i < n % m)."""
    rest, found = list(tokens), []
    for i in range(pieces):
        size = len(tokens) // pieces + (1 if i < len(tokens) % pieces else 0)
        found.append([rest.pop(0) for _ in range(size)])
    assert not rest
    return found


def held(part: KcpPartition, rank: int) -> list[tuple[int, int]]:
    """(doc, position) of a rank's rows."""
    return [(f.doc, f.off + i) for f in part.fragments[rank] for i in range(f.length)]


def every_token(lengths: list[int]) -> list[tuple[int, int]]:
    return [(doc, i) for doc, length in enumerate(lengths) for i in range(length)]


def random_table(lengths: list[int], world_size: int, rng: random.Random) -> list[list[tuple[int, int, int]]]:
    """Every document in runs of 0, 1, 2 or more tokens, each on any rank."""
    table: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    for doc, length in enumerate(lengths):
        off = 0
        while off < length or rng.random() < 0.3:
            size = min(rng.choice((0, 1, 1, 2, 3, 9)), length - off)
            rng.choice(table).append((doc, off, size))
            off += size
    return [sorted(row) for row in table]


def check_partition(part: KcpPartition, lengths: list[int]) -> None:
    """What holds of every layout, from the definitions."""
    assert part.cu_seqlens == tuple(offsets(lengths))
    assert sorted(token for rank in range(part.world_size) for token in held(part, rank)) == every_token(lengths)
    owner = {}
    for rank, row in enumerate(part.fragments):
        assert [(f.rank, f.slot) for f in row] == [(rank, slot) for slot in range(len(row))]
        assert [(f.doc, f.off) for f in row] == sorted((f.doc, f.off) for f in row)
        assert part.tokens(rank) == len(held(part, rank))
        assert part.cu_seqlens_local(rank) == tuple(offsets([f.length for f in row]))
        owner.update({(f.doc, f.off + i): (rank, f.slot) for f in row for i in range(f.length)})
    for doc, length in enumerate(lengths):
        chain = list(dict.fromkeys(owner[doc, i] for i in range(length)))
        assert part.chains[doc] == tuple(chain)
    for row in part.fragments:
        for f in row:
            before = owner.get((f.doc, f.off - 1)) if f.length else None
            behind = owner.get((f.doc, f.off + f.length)) if f.length else None
            assert (f.prev, f.next) == (before, behind)


@settings(max_examples=100, deadline=None)
@given(lengths, ranks)
def test_contiguous(lengths: list[int], world_size: int) -> None:
    """R97: near-equal intervals of the global order, one fragment per document that an interval meets."""
    part = partition_kcp(offsets(lengths), world_size)
    check_partition(part, lengths)
    for rank, interval in enumerate(dealt(every_token(lengths), world_size)):
        assert held(part, rank) == interval
        assert [f.doc for f in part.fragments[rank]] == list(dict.fromkeys(doc for doc, _ in interval))


@settings(max_examples=100, deadline=None)
@given(lengths, ranks)
def test_zigzag(lengths: list[int], world_size: int) -> None:
    """R97: rank r holds interval r, then interval 2 W - 1 - r, and a document in both is two fragments."""
    part = partition_kcp(offsets(lengths), world_size, "zigzag")
    check_partition(part, lengths)
    intervals = dealt(every_token(lengths), 2 * world_size)
    for rank in range(world_size):
        front, back = intervals[rank], intervals[2 * world_size - 1 - rank]
        assert held(part, rank) == front + back
        documents = [doc for interval in (front, back) for doc in dict.fromkeys(doc for doc, _ in interval)]
        assert [f.doc for f in part.fragments[rank]] == documents


@settings(max_examples=100, deadline=None)
@given(lengths, ranks)
def test_zigzag_per_document(lengths: list[int], world_size: int) -> None:
    """R97: two fragments of every document on every rank, empty ones included."""
    part = partition_kcp(offsets(lengths), world_size, "zigzag_per_document")
    check_partition(part, lengths)
    pieces = [dealt([(doc, i) for i in range(length)], 2 * world_size) for doc, length in enumerate(lengths)]
    for rank in range(world_size):
        mine = [document[i] for document in pieces for i in (rank, 2 * world_size - 1 - rank)]
        assert held(part, rank) == [token for piece in mine for token in piece]
        assert [f.length for f in part.fragments[rank]] == [len(piece) for piece in mine]
        assert [f.doc for f in part.fragments[rank]] == [doc for doc in range(len(lengths)) for _ in range(2)]


@settings(max_examples=100, deadline=None)
@given(lengths, ranks, st.integers(0, 1 << 20))
def test_explicit_and_cut_points(lengths: list[int], world_size: int, seed: int) -> None:
    """R97: the fragments that were given, and the pieces between given cuts."""
    rng = random.Random(seed)
    table = random_table(lengths, world_size, rng)
    part = partition_kcp(offsets(lengths), world_size, "explicit", fragments=table)
    check_partition(part, lengths)
    assert [[(f.doc, f.off, f.length) for f in row] for row in part.fragments] == table

    cuts = [[0, *sorted(rng.choices(range(n + 1), k=2 * world_size - 1)), n] for n in lengths]
    part = partition_kcp(offsets(lengths), world_size, "zigzag_per_document", cut_points=cuts)
    check_partition(part, lengths)
    for rank, row in enumerate(part.fragments):
        wanted = [(row[i], row[i + 1]) for row in cuts for i in (rank, 2 * world_size - 1 - rank)]
        assert [(f.off, f.off + f.length) for f in row] == wanted


def test_a_neighbour_of_an_empty_fragment_is_the_next_one_with_tokens() -> None:
    """R97: empty fragments are legal, have no neighbours, and chains skip them."""
    table = [[(0, 0, 2), (0, 3, 0)], [(0, 2, 0), (0, 3, 4)], [(0, 2, 1)]]
    part = partition_kcp([0, 7], 3, "explicit", fragments=table)
    assert part.chains == (((0, 0), (2, 0), (1, 1)),)
    (a, e), (d, c), (b,) = part.fragments
    assert [(f.prev, f.next) for f in (a, b, c)] == [(None, (2, 0)), ((0, 0), (1, 1)), ((2, 0), None)]
    assert [(f.prev, f.next) for f in (d, e)] == [(None, None)] * 2


def test_offsets_in_host_memory_of_every_kind() -> None:
    wanted = partition_kcp([0, 3, 3, 10], 2)
    tensor = torch.tensor([0, 3, 3, 10])
    for given_offsets in ((0, 3, 3, 10), tensor, tensor.int(), tensor.numpy(), array("i", [0, 3, 3, 10])):
        assert partition_kcp(given_offsets, 2) == wanted


class Unreadable(torch.Tensor):
    """A tensor whose contents nobody may read."""

    def tolist(self) -> Any:
        raise AssertionError("read")


def test_offsets_on_a_device_are_refused_unread() -> None:
    """R99: reading them would synchronise."""
    with FakeCuda() as fake:
        on_device = fake.cuda(torch.tensor([0, 3, 10]), 1)
        with pytest.raises(
            ValueError, match="partition_kcp: cu_seqlens_cpu is a tensor on cuda:1; needs offsets in host"
        ):
            partition_kcp(on_device, 2)
    with pytest.raises(ValueError, match="a tensor on meta"):
        partition_kcp(torch.zeros(3, dtype=torch.int64, device="meta").as_subclass(Unreadable), 2)


WRONG: list[tuple[str, type[Exception], str, Callable[[], Any]]] = [
    ("cu_seqlens_cpu is int", TypeError, "sequence", lambda: partition_kcp(5, 2)),
    ("cu_seqlens_cpu is str", TypeError, "sequence", lambda: partition_kcp("012", 2)),
    ("cu_seqlens_cpu is memoryview", TypeError, "sequence", lambda: partition_kcp(memoryview(array("i", [0, 3])), 2)),
    ("cu_seqlens_cpu is bytearray", TypeError, "sequence", lambda: partition_kcp(bytearray((0, 3)), 2)),
    ("cu_seqlens_cpu[0] is 0.0", TypeError, "int", lambda: partition_kcp(array("d", [0, 3]), 2)),
    (
        "cu_seqlens_cpu is a torch.sparse_coo tensor",
        ValueError,
        "a dense tensor",
        lambda: partition_kcp(torch.tensor([0, 3]).to_sparse(), 2),
    ),
    ("cu_seqlens_cpu[1] is 2.5", TypeError, "int", lambda: partition_kcp([0, 2.5], 2)),
    ("cu_seqlens_cpu[1] is True", TypeError, "int", lambda: partition_kcp([0, True], 2)),
    ("cu_seqlens_cpu is of 2 dim", ValueError, "one dimension", lambda: partition_kcp(torch.zeros(2, 2).int(), 2)),
    ("cu_seqlens_cpu is of 1 dimensions and torch.float", ValueError, "", lambda: partition_kcp(torch.zeros(2), 2)),
    ("cu_seqlens_cpu is of 1 offsets", ValueError, "at least 2", lambda: partition_kcp([0], 2)),
    ("cu_seqlens_cpu is of 0 offsets", ValueError, "at least 2", lambda: partition_kcp([], 2)),
    ("cu_seqlens_cpu[0] is 1", ValueError, "0", lambda: partition_kcp([1, 2], 2)),
    ("cu_seqlens_cpu[2] is 4", ValueError, "at least 5", lambda: partition_kcp([0, 5, 4], 2)),
    ("world_size is 2.0", TypeError, "int", lambda: partition_kcp([0, 5], 2.0)),  # type: ignore[arg-type]
    ("world_size is True", TypeError, "int", lambda: partition_kcp([0, 5], True)),
    ("world_size is 0", ValueError, "at least 1", lambda: partition_kcp([0, 5], 0)),
    ("layout is 3", TypeError, "str", lambda: partition_kcp([0, 5], 2, 3)),  # type: ignore[arg-type]
    ("layout is 'ring'", ValueError, "'zigzag'", lambda: partition_kcp([0, 5], 2, "ring")),
    (
        "cut_points is given",
        ValueError,
        "zigzag_per_doc",
        lambda: partition_kcp([0, 5], 1, "zigzag", cut_points=[[0, 1, 5]]),
    ),
    ("cut_points is int", TypeError, "sequence", lambda: per_document(3)),
    ("cut_points is for 2", ValueError, "each of 1", lambda: per_document([[0, 1, 5]] * 2)),
    ("cut_points[0] is of 2", ValueError, "= 3", lambda: per_document([[0, 5]])),
    ("cut_points[0] is (0, 6, 5)", ValueError, "not decrease", lambda: per_document([[0, 6, 5]])),
    ("cut_points[0] is (0, 2, 4)", ValueError, "length 5", lambda: per_document([[0, 2, 4]])),
    ("cut_points[0] is (1, 2, 5)", ValueError, "from 0", lambda: per_document([[1, 2, 5]])),
    ("cut_points[0][1] is 1.0", TypeError, "int", lambda: per_document([[0, 1.0, 5]])),
    ("fragments is None", ValueError, "per rank", lambda: partition_kcp([0, 5], 1, "explicit")),
    ("fragments is given", ValueError, "explicit", lambda: partition_kcp([0, 5], 1, fragments=[[(0, 0, 5)]])),
    ("fragments is int", TypeError, "sequence", lambda: explicit(3)),
    ("fragments is for 1 ranks", ValueError, "world_size = 2", lambda: explicit([[(0, 0, 5)]])),
    ("fragments[1] is int", TypeError, "sequence", lambda: explicit([[(0, 0, 5)], 3])),
    ("fragments[0][0] is int", TypeError, "sequence", lambda: explicit([[5], []])),
    ("fragments[0][0] is of 2", ValueError, "(doc, off, length)", lambda: explicit([[(0, 5)], []])),
    ("fragments[0][0][1] is 0.0", TypeError, "int", lambda: explicit([[(0, 0.0, 5)], []])),
    ("fragments[0][0] is (1, 0, 5)", ValueError, "below 1", lambda: explicit([[(1, 0, 5)], []])),
    ("fragments[0][0] is (-1, 0, 5)", ValueError, "below 1", lambda: explicit([[(-1, 0, 5)], []])),
    ("fragments[0][0] is (0, 0, 6)", ValueError, "which has 5", lambda: explicit([[(0, 0, 6)], []])),
    ("fragments[0][0] is (0, -1, 6)", ValueError, "which has 5", lambda: explicit([[(0, -1, 6)], []])),
    ("fragments[0][1] is (0, 0, 2)", ValueError, "the order", lambda: explicit([[(0, 2, 3), (0, 0, 2)], []])),
    ("without token 2 of document 0", ValueError, "every token once", lambda: explicit([[(0, 0, 2)], [(0, 3, 2)]])),
    ("without token 3 of document 0", ValueError, "every token once", lambda: explicit([[(0, 0, 3)], []])),
    ("with token 2 twice of document 0", ValueError, "every token once", lambda: explicit([[(0, 0, 3)], [(0, 2, 3)]])),
    ("with token 0 twice of document 0", ValueError, "every token once", lambda: explicit([[(0, 0, 5)], [(0, 0, 5)]])),
]


def per_document(cuts: Any) -> Any:
    return partition_kcp([0, 5], 1, "zigzag_per_document", cut_points=cuts)


def explicit(table: Any) -> Any:
    return partition_kcp([0, 5], 2, "explicit", fragments=table)


@pytest.mark.parametrize(("got", "kind", "wanted", "call"), WRONG, ids=[row[0] for row in WRONG])
def test_misuse_of_partition_kcp(got: str, kind: type[Exception], wanted: str, call: Callable[[], Any]) -> None:
    """Each refusal names the argument, what it is and what it needs."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("partition_kcp: ")
    assert got in text
    assert wanted in text.partition("; needs ")[2]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_and_gather_are_inverse(layout: str, dim: int) -> None:
    """R97: any dim, empty documents, ranks without tokens, and a gradient that comes back whole."""
    for sizes in ([0, 5, 0, 2, 17, 3, 1, 1, 30, 0], [1, 0, 1], [0, 0]):
        part = partition_kcp(offsets(sizes), 4, layout)
        total = sum(sizes)
        x = torch.arange(3.0 * total * 2).view(3, total, 2).movedim(1, dim).contiguous().requires_grad_()
        locals_ = [scatter_kcp(x, part, rank, dim=dim) for rank in range(4)]
        for rank, local in enumerate(locals_):
            rows = [part.cu_seqlens[doc] + i for doc, i in held(part, rank)]
            assert torch.equal(local, x.index_select(dim, torch.tensor(rows, dtype=torch.int64)))
        back = gather_kcp(locals_, part, dim=dim)
        assert torch.equal(back, x)
        back.backward(x.detach() + 1)
        assert x.grad is not None
        assert torch.equal(x.grad, x.detach() + 1)


PART = partition_kcp([0, 5], 2)
ROWS = [torch.zeros(n, 2) for n in (3, 2)]
WRONG_ROWS: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    ("scatter_kcp: x is list", TypeError, lambda: scatter_kcp([1], PART, 0)),  # type: ignore[arg-type]
    ("scatter_kcp: part is int", TypeError, lambda: scatter_kcp(torch.zeros(5), 3, 0)),  # type: ignore[arg-type]
    ("scatter_kcp: rank is 2; needs at most 1", ValueError, lambda: scatter_kcp(torch.zeros(5), PART, 2)),
    ("scatter_kcp: rank is None", TypeError, lambda: scatter_kcp(torch.zeros(5), PART, None)),  # type: ignore[arg-type]
    ("scatter_kcp: dim is 1; needs a dimension of x", ValueError, lambda: scatter_kcp(torch.zeros(5), PART, 0, dim=1)),
    ("scatter_kcp: x is of 4 tokens along dim 0; needs 5", ValueError, lambda: scatter_kcp(torch.zeros(4), PART, 0)),
    ("gather_kcp: parts is Tensor", TypeError, lambda: gather_kcp(torch.zeros(2, 5), PART)),  # type: ignore[arg-type]
    ("gather_kcp: parts is of 1 ranks; needs world_size = 2", ValueError, lambda: gather_kcp(ROWS[:1], PART)),
    ("gather_kcp: parts[0] is of 2 tokens along dim 0; needs 3", ValueError, lambda: gather_kcp(ROWS[::-1], PART)),
    (
        "gather_kcp: parts[1] is [2, 2] of torch.float64",
        ValueError,
        lambda: gather_kcp([ROWS[0], ROWS[1].double()], PART),
    ),
    ("gather_kcp: parts[1] is [2, 1] of", ValueError, lambda: gather_kcp([ROWS[0], ROWS[1][:, :1]], PART)),
]


@pytest.mark.parametrize(("text", "kind", "call"), WRONG_ROWS, ids=[row[0] for row in WRONG_ROWS])
def test_misuse_of_scatter_and_gather(text: str, kind: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)


def test_the_partition_half_needs_no_torch() -> None:
    """R99: importing, cutting and planning a halo work where there is no torch."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'tvm_ffi', 'rich')))\n"
        "from cake_core import kcp\n"
        "from cake_core.kcp import halo_plan, partition_kcp\n"
        "part = partition_kcp([0, 5, 9], 2, 'zigzag'); assert halo_plan(part, 1, 4).fwd_recv_rows\n"
        "assert part.tokens(0) == 5"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert halo_plan(partition_kcp([0, 5, 9], 2, "zigzag"), 1, 4).width == 4


def test_type_checkers_see_exactly_the_lazy_names() -> None:
    spec = importlib.util.find_spec("cake_core.kcp")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    checked = {
        alias.asname: f"cake_core.kcp.{node.module}"
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(name for name in checked if name) == sorted(kcp.__all__)
    for name, module in checked.items():
        assert name is not None
        assert getattr(kcp, name) is getattr(importlib.import_module(module), name)
