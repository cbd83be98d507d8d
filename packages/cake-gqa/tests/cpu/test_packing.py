"""Segments, layouts and strides: what changes no bit, and what stays out of the neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cake_core.testing.fake_cuda import FakeCuda, recorded_launches
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from cake_gqa import varlen_gqa_attention
from cake_gqa.layouts import zigzag_layout
from cake_gqa.testing import shapes, steps
from torch import Tensor

BF16 = torch.bfloat16
SEGMENTS = ((0, 0), (37, 37), (1, 140), (0, 5), (64, 64), (9, 0), (130, 91), (20, 700), (0, 0))
QUERIES, KEYS = ("out", "lse", "dq"), ("dk", "dv", "dk_fp32", "dv_fp32")


def part(outputs: Mapping[str, Tensor], step: steps.Step, n: int) -> dict[str, Tensor]:
    """Segment ``n``'s share of every output that has rows of the operands."""
    rows, keys = step.spans[n]
    found = {name: outputs[name][:, rows] if name == "lse" else outputs[name][rows] for name in QUERIES}
    return found | {name: outputs[name][keys] for name in KEYS if name in outputs}


def fill(step: steps.Step, n: int, value: float) -> None:
    """Segment ``n``'s operands become ``value``."""
    rows, keys = step.spans[n]
    for t in (step.q, step.dout):
        t[rows] = value
    for t in (step.k, step.v):
        t[keys] = value


# --- segments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "window"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("heads", [(2, 1), (6, 2)])
def test_a_segment_in_a_pack_has_the_bits_of_its_own_call(heads: tuple[int, int], dtype: str, form: str) -> None:
    step = steps.make_step(SEGMENTS, heads, dtype=dtype, form=form)
    packed = step.run()
    for n in range(len(SEGMENTS)):
        steps.assert_same_step(part(packed, step, n), step.document(n).run(), f"segment {n}")


@pytest.mark.parametrize("heads", [(1, 1), (5, 1)])
@pytest.mark.parametrize("threads", [2, 3])
def test_a_segment_has_its_bits_with_any_number_of_threads(threads: int, heads: tuple[int, int]) -> None:
    step = steps.make_step(shapes.PACKS["40-short"], heads, dtype="float32")
    torch.set_num_threads(threads)
    packed = step.run()
    torch.set_num_threads(1)
    for n in (0, 7, 20, 39):
        steps.assert_same_step(part(packed, step, n), step.document(n).run(), f"segment {n}")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30, 0.5])
@pytest.mark.parametrize("hurt", [1, 2, 3, 5, 6])
def test_what_a_segment_holds_changes_no_bit_of_another(hurt: int, value: float) -> None:
    """Also a segment without queries, and one without keys."""
    step = steps.make_step(SEGMENTS, (4, 2), dtype="bfloat16", form="window")
    want = step.run()
    fill(step, hurt, value)
    got = step.run()
    for n, (nq, nk) in enumerate(SEGMENTS):
        if n != hurt:
            steps.assert_same_step(part(got, step, n), part(want, step, n), f"segment {n} beside {hurt}")
        elif value != value and nq and nk:
            own = part(got, step, n)
            seeing = slice(max(0, nq - nk), nq)
            assert bool(own["out"][seeing].isnan().all())
            assert bool(own["dk_fp32"].isnan().all())


def test_a_segment_adds_to_its_own_rows_alone() -> None:
    """NaN in one segment reaches the destination rows that its keys name, and no other."""
    lengths = ((5, 9), (20, 30), (6, 2))
    step = steps.make_step(lengths, (2, 1), form="add", row_map=range(41))
    want = step.run()
    fill(step, 1, torch.nan)
    got = step.run()
    for name in ("dk_fp32", "dv_fp32"):
        rows = [*range(9), *range(39, 43)]
        assert_same_bits(got[name][rows], want[name][rows], name)
        assert bool(got[name][9:39].isnan().all())


def test_a_later_row_is_not_seen_by_an_earlier_one() -> None:
    """Finite values of the last key and query of a document change nothing of what came before."""
    step = steps.make_step((150,), (2, 1), dtype="float32")
    want = step.run()
    for t in (step.k, step.v):
        t[149] = 100.0
    got = step.forward()
    assert_same_bits(got["out"][:149], want["out"][:149], "out")
    assert_same_bits(got["lse"][:, :149], want["lse"][:, :149], "lse")
    assert not torch.equal(got["out"][149], want["out"][149])


def test_another_order_of_the_segments_is_another_order_of_the_results() -> None:
    step = steps.make_step(SEGMENTS, (4, 2), form="window")
    want = step.run()
    order = (7, 3, 0, 6, 2, 8, 5, 1, 4)
    spans = step.spans
    turned = replace(
        step,
        **{name: torch.cat([getattr(step, name)[spans[n][0]] for n in order]) for name in ("q", "dout")},
        **{name: torch.cat([getattr(step, name)[spans[n][1]] for n in order]) for name in ("k", "v")},
        cu_q=steps.offsets([SEGMENTS[n][0] for n in order]),
        cu_k=steps.offsets([SEGMENTS[n][1] for n in order]),
    )
    got = turned.run()
    for place, n in enumerate(order):
        steps.assert_same_step(part(got, turned, place), part(want, step, n), f"segment {n}")


@pytest.mark.parametrize("where", ["first", "middle", "last", "all around"])
@pytest.mark.parametrize("empty", [(0, 0), (0, 4), (4, 0)])
def test_empty_segments_anywhere(empty: tuple[int, int], where: str) -> None:
    """They leave the others their bits, whatever their rows hold."""
    full = ((37, 37), (70, 100))
    places = {"first": (0,), "middle": (1,), "last": (2,), "all around": (0, 0, 1, 1, 2, 2)}[where]
    lengths: list[tuple[int, int]] = []
    for n in range(3):
        lengths += [empty] * places.count(n)
        lengths += full[n : n + 1]
    step = steps.make_step(lengths, (4, 2), form="window")
    for n, pair in enumerate(lengths):
        if pair == empty:
            fill(step, n, torch.nan)
    got = step.differentiate()
    steps.assert_same_step(step.run(), got, "functional")
    for n, pair in enumerate(lengths):
        own = part(got, step, n)
        if pair != empty:
            steps.assert_same_step(own, step.document(n).run(), f"segment {n}")
        else:
            for name, value in own.items():
                blank = torch.full_like(value, -torch.inf) if name == "lse" else torch.zeros_like(value)
                assert_same_bits(value, blank, f"{name} of the empty segment {n}")


# --- ranks of context parallelism -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["split", "ceil"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_of_context_parallelism_together_are_the_whole_documents(ranks: int, rule: str) -> None:
    """Each rank has two chunks of queries of every document and windows of the gathered keys: outputs and dq are those
    rows of the whole call, and the gradients that the ranks add to the gathered keys are its dk and dv."""
    documents, heads = (50, 31, 3), (4, 2)
    whole = steps.make_step(documents, heads, dtype="float64")
    want = whole.run()
    sums = [torch.zeros(whole.k.shape, dtype=torch.float32) for _ in range(2)]
    done = torch.zeros(84, dtype=torch.int64)
    for rank in range(ranks):
        layout = zigzag_layout(documents, ranks, rank, rule)
        cu_q, cu_k, row_map = layout.tensors("cpu")
        # The queries of a chunk are the last rows of its window.
        sizes = [(b - a, d - c) for (a, b), (c, d) in zip(pairwise(layout.cu_q), pairwise(layout.cu_k), strict=True)]
        ends = [row_map[end - nq : end] for (nq, _), end in zip(sizes, layout.cu_k[1:], strict=True)]
        rows, windows = torch.cat(ends).long(), row_map.long()
        own = steps.Step(
            whole.q[rows], whole.k[windows], whole.v[windows], whole.dout[rows], cu_q, cu_k, layout.max_seqlen_k,
            form="add", row_map=row_map, start=(sums[0], sums[1]),
        )  # fmt: skip
        got = own.differentiate()
        for name in ("out", "dq"):
            assert_rel_rms(got[name], want[name][rows], 1e-12, f"{name} of rank {rank}")
        assert_rel_rms(got["lse"], want["lse"][:, rows], 1e-12, f"lse of rank {rank}")
        sums = [got["dk_fp32"], got["dv_fp32"]]
        done[rows] += 1
    assert bool(done.eq(1).all()), "every query has a rank"
    for name, total in zip(("dk", "dv"), sums, strict=True):
        assert_rel_rms(total, want[name], 3e-7, name)


# --- strides ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [name for name in steps.VIEWS if name != "dense"])
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_views_have_the_bits_of_dense_operands(names: str, view: str) -> None:
    """k and v may lie differently; twice, in case anything is remembered of the first call."""
    step = steps.make_step((40, (3, 90), (0, 4), (70, 5)), (4, 2), form="window")
    want = step.run()
    other = replace(step, **{name: steps.VIEWS[view](getattr(step, name)) for name in names})
    for _ in range(2):
        steps.assert_same_step(other.run(), want, f"{names} {view}")
        steps.assert_same_step(other.differentiate(), want, f"{names} {view}, autograd")


def test_slices_of_one_fused_projection_are_read_in_place() -> None:
    """[T, (H_q + 2 H_kv) D]: the gradient of the projection is dq, dk and dv side by side."""
    tokens, heads_q, heads_kv = 90, 4, 2
    projection = normal(0, tokens, (heads_q + 2 * heads_kv) * 256).requires_grad_()
    step = steps.make_step((60, 30), (heads_q, heads_kv))
    q, k, v = projection.unflatten(1, (-1, 256)).split([heads_q, heads_kv, heads_kv], 1)
    fused = replace(step, q=q.detach(), k=k.detach(), v=v.detach())
    dense = replace(step, **{name: getattr(fused, name).contiguous() for name in ("q", "k", "v")})
    want = dense.run()
    steps.assert_same_step(fused.run(), want, "views")
    out = varlen_gqa_attention(q, k, v, step.cu_q, step.cu_k, max_seqlen_k=60)
    assert isinstance(out, Tensor)
    (grad,) = torch.autograd.grad(out, projection, step.dout)
    wanted = torch.cat([want[name] for name in ("dq", "dk", "dv")], 1).flatten(1)
    assert_same_bits(grad, wanted, "the gradient of the projection")


def layouts_of_dout(step: steps.Step) -> dict[str, Tensor]:
    dout = step.dout
    wide = torch.full((dout.shape[0], dout.shape[1], 264), torch.nan, dtype=dout.dtype)
    wide[..., 4:260] = dout
    return {
        "one number": torch.full((), 0.5, dtype=dout.dtype).expand_as(dout),
        "one row": dout[:1].expand_as(dout),
        "one head": dout[:, :1].expand_as(dout),
        "one channel": dout[..., :1].expand_as(dout),
        "transposed": dout.transpose(0, 2).contiguous().transpose(0, 2),
        "heads first": dout.transpose(0, 1).contiguous().transpose(0, 1),
        "at an odd address": wide[..., 4:260],
        "every second channel": dout.repeat_interleave(2, -1)[..., ::2],
        "negated": torch._neg_view(-dout),
    }


@pytest.mark.parametrize("name", layouts_of_dout(steps.make_step((1,), (2, 1))))
def test_a_gradient_of_any_layout_has_the_bits_of_a_dense_one(name: str) -> None:
    """Through autograd, which copies what the kernels cannot read."""
    step = steps.make_step((40, 25, (5, 9)), (8, 2))
    dout = layouts_of_dout(step)[name]
    dense = replace(step, dout=dout.clone(memory_format=torch.contiguous_format))
    steps.assert_same_step(replace(step, dout=dout).differentiate(), dense.differentiate(), name)


@pytest.mark.parametrize("name", layouts_of_dout(steps.make_step((1,), (2, 1))))
def test_kernels_get_rows_that_they_can_read(name: str) -> None:
    """flash-attention 355, 1149, 2541: whatever autograd hands over, and operands that share elements."""
    step = steps.make_step((40, 25, (5, 9)), (8, 2))
    with FakeCuda(devices=1) as fake, recorded_launches() as launches:
        moved = replace(step, **{each: fake.cuda(getattr(step, each)) for each in ("q", "k", "v", "cu_q", "cu_k")})
        dout = fake.place(layouts_of_dout(step)[name])
        moved = replace(moved, dout=dout, q=moved.q[:, :1].expand_as(step.q) if name == "one head" else moved.q)
        moved.differentiate()
    rows = [t for launch in launches for t in launch.args if isinstance(t, Tensor) and t.dim() == 3 and t.dtype == BF16]
    assert len(rows) >= 12
    for t in rows:
        assert t.stride(2) == 1
        assert all(stride > 0 and stride % 8 == 0 for stride in t.stride()[:2])
        assert t.data_ptr() % 16 == 0


def test_the_gradient_of_a_sum() -> None:
    """All strides are 0."""
    step = steps.make_step((65,), (8, 2))
    leaves = step.leaves()
    out, _ = step.attend(leaves)
    out.sum().backward()
    want = replace(step, dout=torch.ones_like(step.q)).differentiate()
    for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
        assert leaf.grad is not None
        assert_same_bits(leaf.grad, want[name], name)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_expanded_operands_have_the_bits_of_copies(name: str) -> None:
    """A stride of 0 is copied by the autograd entry point; the gradient of the base is the sum over the copies."""
    step = steps.make_step((40,), (4, 2), dtype="float32")
    base = getattr(step, name)[:, :1].clone()
    shape = getattr(step, name).shape
    views = replace(step, **{name: base.expand(shape)})
    copies = replace(step, **{name: base.expand(shape).contiguous()})
    steps.assert_same_step(views.differentiate(), copies.differentiate(), name)


def test_views_of_operands_are_not_written() -> None:
    from cake_core.testing.gates import assert_operands_untouched

    step = steps.make_step((40, (3, 9)), (4, 2), view="columns")
    operands = {name: getattr(step, name) for name in ("q", "k", "v", "dout", "cu_q", "cu_k")}
    bases = {f"base of {name}": t._base for name, t in operands.items() if t._base is not None}
    assert len(bases) == 3
    with assert_operands_untouched(operands | bases):
        step.run()
        step.differentiate()
