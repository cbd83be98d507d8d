"""Documents, layouts, strides and plans: what changes no bit, and what stays out of the neighbours."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from cake_gdn import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, packed_qkv_views
from cake_gdn.testing import budgets, steps
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

BF16 = torch.bfloat16
LENGTHS = (0, 37, 1, 64, 0, 91, 0)
STARTS = (0, 0, 37, 38, 102, 102, 193)


def rows_of(value: Tensor, name: str, n: int) -> Tensor:
    """Document ``n``'s part of an output of LENGTHS."""
    if name in ("final_state", "dh0"):
        return value[n : n + 1]
    return value[:, STARTS[n] : STARTS[n] + LENGTHS[n]]


# --- documents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["serial", 2])
@pytest.mark.parametrize("state", [True, False])
def test_a_document_in_a_pack_has_the_bits_of_its_own_call(state: bool, plan: str | int) -> None:
    """plan="serial" and an int: a document's bits do not depend on what else is packed."""
    step = steps.make_step(LENGTHS, (1, 2), state=state, gates="slow")
    packed = step.run(plan=plan)
    for n, length in enumerate(LENGTHS):
        own = step.document(n).run(plan=plan)
        for name, value in own.items():
            if length or name in ("final_state", "dh0"):
                assert_same_bits(rows_of(packed[name], name, n), value, f"{name} of document {n}")


def test_empty_documents_pass_their_states_through() -> None:
    step = steps.make_step(LENGTHS, (1, 2), state=True)
    assert step.state is not None
    assert step.dht is not None
    got = step.differentiate()
    for n in (0, 4, 6):
        assert_same_bits(got["final_state"][n], step.state[n], "final_state")
        assert_same_bits(got["dh0"][n], step.dht[n], "dh0")
    assert not torch.equal(got["dh0"][1], step.dht[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30, -3.0])
@pytest.mark.parametrize("index", [1, 3])
@pytest.mark.parametrize("plan", ["auto", 2])
def test_a_document_full_of_anything_leaves_the_others_alone(index: int, value: float, plan: str | int) -> None:
    """D02: every output of the other documents keeps its bits, whatever one document and its states hold."""
    step = steps.make_step(LENGTHS, (1, 2), dtype="float32", state=True, gates="slow")
    want = step.run(plan=plan)
    rows = slice(STARTS[index], STARTS[index] + LENGTHS[index])
    for t in (step.q, step.k, step.v, step.do):
        assert t is not None
        t[:, rows] = value
    for t in (step.state, step.dht):
        assert t is not None
        t[index] = value
    step.g[:, rows] = -3.0 if value > 0 else value  # e^inf is the caller's overflow
    got = step.run(plan=plan)
    for n in range(len(LENGTHS)):
        for name in want:
            if n != index:
                assert_same_bits(rows_of(got[name], name, n), rows_of(want[name], name, n), f"{name} of document {n}")
    if value != value:
        assert rows_of(got["o"], "o", index).isnan().all()


def test_a_nan_token_reaches_later_outputs_and_earlier_gradients() -> None:
    """And the other rows of its own chunk, whose products it takes part in; no earlier output, no later gradient."""
    step = steps.make_step((200,), (1, 1), dtype="float32")
    want = step.run()
    kept = step.v[0, 100].clone()
    step.v[0, 100] = torch.nan
    got = step.run()
    assert_same_bits(got["o"][:, :64], want["o"][:, :64], "o of the chunk before")
    assert got["o"][:, 100:].isnan().all()
    step.v[0, 100] = kept
    assert step.do is not None
    step.do[0, 100] = torch.nan
    got = step.run()
    assert_same_bits(got["dv"][:, 128:], want["dv"][:, 128:], "dv of the chunk behind")
    assert got["dv"][:, :101].isnan().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("host", [False, True])
def test_padding_rows_are_not_read_and_their_results_are_zeros(host: bool, dtype: str) -> None:
    """cu[-1] < T, NaN behind it: more than a chunk of padding, and less."""
    for padding in (1, 170):
        step = steps.make_step((100, 30), (1, 2), dtype=dtype, state=True, padding=padding)
        options = {"cu_seqlens_cpu": [0, 100, 130]} if host else {}
        got = step.differentiate(**options)
        clean = replace(
            step, **{name: getattr(step, name)[:, :130].clone() for name in ("q", "k", "v", "g", "beta", "do")}
        )
        want = clean.differentiate()
        for name, value in got.items():
            if name in ("final_state", "dh0"):
                assert_same_bits(value, want[name], name)
            else:
                assert_same_bits(value[:, :130], want[name], name)
                assert value[:, 130:].eq(0.0).all(), f"{name} of the padding"


def test_nothing_but_padding() -> None:
    step = steps.make_step((0, 0), (1, 2), state=True, padding=70)
    got = step.differentiate()
    for name, value in got.items():
        if name not in ("final_state", "dh0"):
            assert value.shape[1] == 70
            assert value.eq(0.0).all(), name
    assert step.state is not None
    assert_same_bits(got["final_state"], step.state, "final_state")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_dtype_on_the_host_or_the_device(dtype: torch.dtype) -> None:
    """cu_seqlens, cu_seqlens_cpu as a tensor, a list or a tuple, both, or the host ones alone: the same bits."""
    step = steps.make_step((37, 0, 91), (1, 2))
    want = step.run(plan="serial")
    listed = [0, 37, 37, 128]
    device = torch.tensor(listed, dtype=dtype)
    for cu, host in (
        (device, None),
        (device, device.clone()),
        (device, listed),
        (None, tuple(listed)),
        (None, torch.tensor(listed, dtype=dtype)),
    ):
        got = step.run(plan="serial", cu_seqlens=cu, cu_seqlens_cpu=host)
        steps.assert_same_step(got, want, f"{cu} {host}")


# --- shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_cpu"])
def test_offsets_may_be_the_result_of_a_collective_that_still_runs(name: str) -> None:
    """A wrapper has no memory of its own: its address is 0."""
    step = replace(steps.make_step((70,), (1, 2)), cu=None)
    cu = steps.offsets((30, 40))
    want = step.run(cu_seqlens_cpu=cu)
    steps.assert_same_step(step.run(**{name: collectives.AsyncCollectiveTensor(cu)}), want, name)


def test_a_batch_is_packed_documents_of_one_length() -> None:
    """[B, T, ...] without offsets: the packed call's bits, in the shapes of the operands."""
    step = steps.make_step((70, 70, 70), (1, 2), state=True, batch=True)
    flat = {name: getattr(step, name).flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta", "do")}
    packed = replace(step, **flat, cu=steps.offsets((70, 70, 70)))
    got, want = step.differentiate(), packed.differentiate()
    assert got["o"].shape == step.v.shape
    for name in want:
        assert_same_bits(got[name].reshape(want[name].shape), want[name], name)


def test_states_of_the_other_layout_are_the_transposed_call_bit_for_bit() -> None:
    step = steps.make_step((70, 0, 30), (1, 2), state=True)
    assert step.state is not None
    assert step.dht is not None
    other = replace(step, state=step.state.mT.contiguous(), dht=step.dht.mT.contiguous(), v_first=True)
    for entry in (steps.Step.run, steps.Step.differentiate):
        got, want = entry(other), entry(step)
        for name in want:
            value = got[name].mT if name in ("final_state", "dh0") else got[name]
            assert_same_bits(value, want[name], name)
        for name in ("final_state", "dh0"):
            assert got[name].is_contiguous(), name


def test_a_group_of_value_heads_shares_its_key_head() -> None:
    """GVA equals the call on repeated q and k; their gradients are summed over the group."""
    for group in (2, 3, 4):
        step = steps.make_step((80,), (2, 2 * group), dtype="float64")
        wide = replace(step, q=step.q.repeat_interleave(group, 2), k=step.k.repeat_interleave(group, 2))
        got, want = step.run(), wide.run()
        for name in ("o", "dv", "dg", "dbeta"):
            torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-13)
        for name in ("dq", "dk"):
            summed = want[name].unflatten(2, (2, group)).sum(3)
            torch.testing.assert_close(got[name], summed, rtol=1e-12, atol=1e-13)


# --- strides ----------------------------------------------------------------------------------------------------


def strided(t: Tensor, kind: str) -> Tensor:
    if kind == "transposed":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "every-second":
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), torch.nan, dtype=t.dtype)
        wide[..., 1::2] = t
        return wide[..., 1::2]
    if kind == "rows":
        wide = torch.full((t.shape[0], 2 * t.shape[1], *t.shape[2:]), torch.nan, dtype=t.dtype)
        wide[:, ::2] = t
        return wide[:, ::2]
    if kind == "expanded":
        return t[:, :1].expand_as(t)
    return torch._neg_view(-t)


@pytest.mark.parametrize("kind", ["transposed", "every-second", "rows", "expanded", "negated"])
@pytest.mark.parametrize("operand", ["q", "v", "g", "beta", "do", "state", "dht"])
def test_strided_operands_have_the_bits_of_contiguous_ones(operand: str, kind: str) -> None:
    step = steps.make_step((40, 30), (1, 2), state=True)
    view = strided(getattr(step, operand), kind)
    got = replace(step, **{operand: view}).differentiate()
    want = replace(step, **{operand: view.clone(memory_format=torch.contiguous_format)}).differentiate()
    steps.assert_same_step(got, want, f"{operand} {kind}")
    for name, value in got.items():
        assert value.is_contiguous(), f"{name} is fresh and dense"


def test_a_packed_row_gives_the_bits_of_contiguous_operands_and_one_packed_gradient() -> None:
    """Views of one row: no copy of q, k, v; their gradients lie in one buffer, which is the gradient of the row."""
    qkv = normal(0, 1, 130, 4 * 128)
    other = steps.make_step((100, 30), (1, 2))
    results: list[dict[str, Tensor]] = []
    for views in (True, False):
        leaf = qkv.clone().requires_grad_()
        if views:
            q, k, v = packed_qkv_views(leaf, num_qk_heads=1, num_v_heads=2)
            assert [t.shape for t in (q, k, v)] == [(1, 130, 1, 128), (1, 130, 1, 128), (1, 130, 2, 128)]
            assert all(t.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() for t in (q, k, v))
        else:
            q, k, v = (
                leaf[..., columns].unflatten(-1, (-1, 128)).contiguous()
                for columns in (slice(128), slice(128, 256), slice(256, 512))
            )
        o, _ = chunk_gated_delta_rule(q, k, v, other.g, other.beta, use_qk_l2norm_in_kernel=True, cu_seqlens=other.cu)
        grads = torch.autograd.grad(o, (q, k, v), other.do, retain_graph=True)
        if views:
            storages = {t.untyped_storage().data_ptr() for t in grads}
            assert len(storages) == 1, "dq, dk and dv are views of one buffer"
            assert grads[0].stride(1) == grads[2].stride(1) == 4 * 128
        (row,) = torch.autograd.grad(o, leaf, other.do)
        results.append({"o": o.detach(), "row": row})
    steps.assert_same_step(*results, where="packed")
    assert results[0]["row"].shape == qkv.shape


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_the_gradient_of_a_packed_row_is_joined_where_it_has_to_be(missing: int) -> None:
    """Gradients that are not the views of one buffer are concatenated; a missing one counts as zeros."""
    leaf = normal(0, 1, 5, 4 * 128).requires_grad_()
    views = packed_qkv_views(leaf, num_qk_heads=1, num_v_heads=2)
    seeds = [normal(i + 1, *view.shape) for i, view in enumerate(views)]
    used = [(view, seed) for i, (view, seed) in enumerate(zip(views, seeds, strict=True)) if i != missing]
    torch.autograd.backward([view for view, _ in used], [seed for _, seed in used])
    seeds[missing].zero_()
    assert leaf.grad is not None
    assert_same_bits(leaf.grad, torch.cat([seed.flatten(2) for seed in seeds], -1), "row")


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (2, 3, 0, 1), (0, 1, 3, 4), (0, 2, 3, 4)])
def test_gradients_that_lie_otherwise_in_one_buffer_are_joined(order: tuple[int, ...]) -> None:
    """Head views of one row, with equal strides, but not [q | k | v] side by side: other places, gaps."""
    leaf = normal(0, 1, 5, 4 * 128).requires_grad_()
    views = packed_qkv_views(leaf, num_qk_heads=1, num_v_heads=2)
    row = normal(1, 1, 5, max(order) + 1, 128)
    seeds = [row[:, :, order[0]][:, :, None], row[:, :, order[1]][:, :, None], row[:, :, order[2] : order[2] + 2]]
    want = torch.cat([seed.flatten(2) for seed in seeds], -1)
    assert len({seed.untyped_storage().data_ptr() for seed in seeds}) == 1
    (got,) = torch.autograd.grad(views, leaf, seeds)
    assert_same_bits(got, want, "row")


def test_packed_views_of_other_ranks_of_tensor() -> None:
    """[..., T, channels]: without a batch dimension, and strided rows of a wider buffer."""
    wide = normal(0, 7, 4 * 128 + 4)
    q, k, v = packed_qkv_views(wide[:, : 4 * 128], num_qk_heads=1, num_v_heads=2)
    assert (q.shape, k.shape, v.shape) == ((7, 1, 128), (7, 1, 128), (7, 2, 128))
    assert_same_bits(k[:, 0], wide[:, 128:256].contiguous(), "k")


def test_a_misaligned_packed_row_is_copied_and_right() -> None:
    """fla #913: a token stride of (2H + HV) * 128 + 4 elements."""
    wide = torch.full((1, 100, 4 * 128 + 4), torch.nan, dtype=BF16)
    wide[..., : 4 * 128] = normal(0, 1, 100, 4 * 128)
    step = steps.make_step((100,), (1, 2))
    heads = wide[..., : 4 * 128].unflatten(-1, (4, 128)).split([1, 1, 2], 2)
    got = replace(step, q=heads[0], k=heads[1], v=heads[2]).differentiate()
    q, k, v = (t.contiguous() for t in heads)
    steps.assert_same_step(got, replace(step, q=q, k=k, v=v).differentiate(), "misaligned")


# --- plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["auto", "serial", 2, 4, 16, 128])
def test_every_plan_is_within_the_budget(plan: str | int) -> None:
    step = steps.make_step((300, 20), (1, 2), dtype="float32", gates="slow", state=True)
    want = step.reference()
    for name, value in step.run(plan=plan).items():
        assert_rel_rms(value, want[name], budgets.CPU["float32"].rel_rms, f"{plan} {name}")


# --- tables -----------------------------------------------------------------------------------------------------


def test_tables_are_kept_by_the_values_of_the_offsets_and_never_by_the_tensor() -> None:
    """FlashQLA #23: new offsets at a recycled address must not find the old tables."""
    step = steps.make_step((128,), (1, 1), gates="slow")
    want = {cut: replace(step, cu=torch.tensor([0, cut, 128], dtype=torch.int32)).run()["o"] for cut in (1, 64, 100)}
    assert not torch.equal(want[1], want[100])
    addresses: set[int] = set()
    memory = torch.zeros(3, dtype=torch.int32)
    for turn in range(60):
        cut = (1, 64, 100)[turn % 3]
        memory.copy_(torch.tensor([0, cut, 128]))
        fresh = torch.tensor([0, cut, 128], dtype=torch.int32)
        addresses.add(fresh.data_ptr())
        for cu, host in ((memory, None), (fresh, None), (fresh, fresh.clone()), (None, [0, cut, 128])):
            got = chunk_gated_delta_rule_fwd(
                step.q, step.k, step.v, step.g, step.beta, use_qk_l2norm_in_kernel=True,
                cu_seqlens=cu, cu_seqlens_cpu=host, save="none",
            )[0]  # fmt: skip
            assert_same_bits(got, want[cut], f"cut {cut}")
        del fresh
        gc.collect(0)
    assert len(addresses) < 60, "no address was used twice"


def test_many_documents_of_one_token() -> None:
    """Sampled: each equals its own call."""
    count = 300
    step = steps.make_step((1,) * count, (1, 2), gates="slow")
    got: dict[str, Any] = step.run(plan="serial")
    for n in (0, 1, 150, count - 1):
        own = step.document(n).run(plan="serial")
        for name in own:
            assert_same_bits(got[name][:, n : n + 1], own[name], f"{name} of document {n}")
