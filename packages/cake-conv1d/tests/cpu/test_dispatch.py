"""Dispatch on fake CUDA devices: which library, which arguments, which buffers, on which device and stream.

A recorder stands in for the programs. What they compute from their arguments is the emulation's to test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cake_conv1d import (
    RecomputeHandle,
    api,
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_kcp,
    causal_conv1d_kcp_multi,
    conv_final_state,
)
from cake_conv1d.plan import plan_backward
from cake_core import config, device, workspace
from cake_core.kcp import build_context_kcp, partition_kcp
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.launches import Launch, recorded_launches
from cake_core.testing.operands import normal
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
# Positions among the arguments of the programs.
FWD = ("y", "x", "weight", "cu", "length", "history", "table", "skip", "silu")
BWD = ("dx", "dweight", "partial", "dy", "x", "weight", "cu", "length", "history", "table", "d_final", "skip")
BWD += ("silu", "rounded", "blocks", "rows")
HALO = (
    "edge",
    "out",
    "x",
    "weight",
    "dy",
    "read",
    "table",
    "cu",
    "length",
    "history",
    "history_table",
    "silu",
    "rounded",
)
GATHER, HEAD_FORWARD, HEAD_GRADIENT, TAIL_GRADIENT, FINAL_STATE, INITIAL_GRADIENT = range(6)


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def offsets(fake: FakeCuda, *lengths: int, dtype: torch.dtype = torch.int32, index: int = 0) -> Tensor:
    return fake.cuda(torch.tensor([0, *lengths]).cumsum(0).to(dtype), index)


def named(launch: Launch) -> dict[str, Any]:
    program = launch.library.split("_")[1]
    return dict(zip({"fwd": FWD, "bwd": BWD, "halo": HALO}[program], launch.args, strict=True))


def shape_of(value: object) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else value


def step(fake: FakeCuda, tokens: int, channels: int, index: int = 0, taps: torch.dtype = BF16, **given: Any) -> None:
    """Forward and backward of both gradients."""
    x = fake.cuda(normal(0, tokens, channels), index).requires_grad_()
    w = fake.cuda(normal(1, channels, 4, dtype=taps), index).requires_grad_()
    y = causal_conv1d(x, w, **given)
    assert isinstance(y, Tensor)
    y.backward(fake.cuda(normal(2, tokens, channels), index))


def ranks_step(fake: FakeCuda, index: int = 0, handle: RecomputeHandle | None = None, tensors: int = 1) -> None:
    """Forward and backward of one rank whose two fragments share a document."""
    context = build_context_kcp(partition_kcp([0, 20, 60], 1, "zigzag"), None, 0, torch.device("cuda", index))
    xs = [fake.cuda(normal(seed, 60, 16), index).requires_grad_() for seed in range(tensors)]
    ws = [fake.cuda(normal(seed, 16, 4), index).requires_grad_() for seed in range(tensors)]
    if tensors == 1:
        ys: tuple[Tensor, ...] = (causal_conv1d_kcp(xs[0], ws[0], context, recompute_handle=handle),)
    else:
        ys = causal_conv1d_kcp_multi(xs, ws, context, recompute_handle=handle)
    torch.autograd.backward(ys, [fake.cuda(normal(3, 60, 16), index) for _ in ys])


# --- devices ----------------------------------------------------------------------------------------------------

ARCHES = {
    (8, 0): "sm_80",
    (8, 6): "sm_80",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_80",
}


@pytest.mark.parametrize(("capability", "arch"), ARCHES.items())
def test_a_device_runs_the_libraries_of_its_architecture_or_the_portable_ones(
    capability: tuple[int, int], arch: str
) -> None:
    """R46: one library a pass, the edges of documents and fragments in a third one."""
    with FakeCuda(capability=capability) as fake, recorded_launches() as launches:
        step(fake, 133, 256)
        plain = [launch.library for launch in launches]
        ranks_step(fake)
    assert plain == [f"conv1d_fwd_{arch}", f"conv1d_bwd_{arch}"]
    assert {launch.library for launch in launches} == {f"conv1d_{name}_{arch}" for name in ("fwd", "bwd", "halo")}


def test_everything_happens_on_the_operands_device_and_stream() -> None:
    """N03, X07: device 1's operands with device 0 current: nothing is allocated on 0, device 1's stream is used."""
    with FakeCuda(devices=2) as fake, recorded_launches() as launches, fake.on_stream(1, 0x77):
        step(fake, 4097, 256, index=1, cu_seqlens=offsets(fake, 97, 4000, index=1, dtype=torch.int64))
        ranks_step(fake, index=1)
        assert {allocation.index for allocation in fake.allocations} == {1}
        assert fake.current == 0
    assert {(launch.index, launch.stream) for launch in launches} == {(1, 0x77)}


# --- host reads, captures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_no_offsets_are_read_on_the_host(packed: bool) -> None:
    """D03 and the original requirements: cu_seqlens=None copied host data, one sync a call; given ones stay there."""
    with FakeCuda() as fake, recorded_launches() as launches, device.synchronize_forbidden():
        cu = offsets(fake, 33, 100) if packed else None
        step(fake, 133, 256, cu_seqlens=cu)
        x, w = fake.cuda(normal(0, 133, 16)), fake.cuda(normal(1, 16, 4))
        state = fake.cuda(normal(2, 2 if packed else 1, 3, 16))
        causal_conv1d(x, w, cu, initial_state=state, output_final_state=True)
        causal_conv1d_bwd(x, w, x.clone(), cu, initial_state=state, d_final_state=state.clone())
        ranks_step(fake)
    first = named(launches[0])
    assert (first["cu"] is None) == (not packed)
    assert first["length"] == (0 if packed else 133)


def test_without_offsets_no_tensor_is_built() -> None:
    """The kernels take the length of a document as a number, for [T, C], [1, T, C] and [B, T, C]."""
    with FakeCuda() as fake, recorded_launches() as launches:
        w = fake.cuda(normal(1, 16, 4))
        for shape, length in (((60, 16), 60), ((1, 60, 16), 60), ((3, 20, 16), 20)):
            x = fake.cuda(normal(0, *shape))
            before = len(fake.allocations)
            causal_conv1d(x, w)
            made = fake.allocations[before:]
            assert [(allocation.nbytes, allocation.by) for allocation in made] == [(60 * 16 * 2, "runtime")]
            assert (named(launches[-1])["cu"], named(launches[-1])["length"]) == (None, length)


def test_int64_offsets_are_converted_on_the_device_and_int32_ones_passed_on() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 60, 16)), fake.cuda(normal(1, 16, 4))
        narrow, wide = offsets(fake, 20, 40), offsets(fake, 20, 40, dtype=torch.int64)
        causal_conv1d(x, w, narrow)
        causal_conv1d(x, w, wide)
        first, second = (named(launch)["cu"] for launch in launches)
        assert first.data_ptr() == narrow.data_ptr()
        assert second.dtype == torch.int32
        assert device.device_of(second) == ("cuda", 0)
        assert_same_bits(second, narrow, "cu_seqlens")


def test_malformed_offsets_on_a_device_are_nobodys_error() -> None:
    """Spec 4: not checked on the host; the kernels are memory-safe for any contents."""
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 60, 16)), fake.cuda(normal(1, 16, 4))
        for contents in ([5, 60], [0, 40, 20], [0, 7], [0, 10**9], [-3, 60]):
            causal_conv1d(x, w, fake.cuda(torch.tensor(contents, dtype=torch.int32)))
        assert len(launches) == 5


def test_forward_and_backward_are_capturable_and_a_handle_is_not() -> None:
    """D03: nothing synchronises and no buffer comes from the pool, which a replay would share."""
    config.configure(cake_workspace_pool_bytes=1 << 26)
    with FakeCuda() as fake, recorded_launches() as launches:
        step(fake, 4097, 256)
        pooled = named(launches[-1])["partial"].data_ptr()
        with fake.capture(0), device.synchronize_forbidden():
            step(fake, 4097, 256)
            assert named(launches[-1])["partial"].data_ptr() != pooled
        context = build_context_kcp(partition_kcp([0, 60], 1, "zigzag"), None, 0, "cuda")
        x, w = fake.cuda(normal(0, 60, 16)), fake.cuda(normal(1, 16, 4))
        count = len(launches)
        with fake.capture(0):
            causal_conv1d_kcp(x, w, context)
            assert len(launches) > count
            count = len(launches)
            with pytest.raises(RuntimeError, match=r"causal_conv1d_kcp: recompute_handle .*captured"):
                causal_conv1d_kcp(x, w, context, recompute_handle=RecomputeHandle())
        assert len(launches) == count


# --- plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [BF16, F32])
def test_launches_carry_the_plan_of_the_shape(taps: torch.dtype) -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        step(fake, 4097, 256, taps=taps)
    forward, backward = map(named, launches)
    plan = plan_backward(4097, 256)
    assert plan.partial_rows > 1
    assert (backward["blocks"], backward["rows"]) == (plan.blocks, plan.partial_rows)
    partial = backward["partial"]
    assert (partial.shape, partial.dtype) == ((plan.partial_bytes(256, 4),), torch.uint8)
    assert (forward["weight"].dtype, backward["dweight"].dtype) == (taps, taps)
    assert shape_of(backward["dweight"]) == (256, 4)


def test_the_scratch_of_the_backward_is_the_partial_sums_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec 6: role ("conv1d", "partial"), 4 W C K bytes; none for a single row of sums or without dweight."""
    taken: list[tuple[str, str, int]] = []
    real = workspace.take

    def spy(op: str, role: str, nbytes: int, device_index: int | None = None) -> Tensor:
        taken.append((op, role, nbytes))
        return real(op, role, nbytes, device_index)

    monkeypatch.setattr(workspace, "take", spy)
    with FakeCuda() as fake, recorded_launches() as launches:
        step(fake, 4097, 256)
        assert taken == [("conv1d", "partial", 4 * 4 * 256 * plan_backward(4097, 256).partial_rows)]
        taken.clear()
        step(fake, 7, 256)
        assert plan_backward(7, 256).partial_rows == 1
        assert named(launches[-1])["partial"] is None
        x, w = fake.cuda(normal(0, 4097, 256)), fake.cuda(normal(1, 256, 4))
        causal_conv1d_bwd(x, w, x.clone(), needs=(True, False, False))
        assert not taken
        ranks_step(fake)
        assert {role for _, role, _ in taken} <= {"halo_send", "partial"}
        sends = [nbytes for _, role, nbytes in taken if role == "halo_send"]
        assert sends[-1] == 3 * 16 * 4, "three rows of FP32 gradients cross to the other fragment"


def test_no_launch_depends_on_the_sm_count() -> None:
    """The bits of det do not depend on the device of an architecture; nor on the documents."""

    def launched(sm_count: int) -> list[tuple[object, ...]]:
        api.release()  # a remembered plan would hide that it depends on the device
        with FakeCuda(sm_count=sm_count) as fake, recorded_launches() as launches:
            for tokens in (1, 17, 64, 4097):
                step(fake, tokens, 264)
            ranks_step(fake)
            # Channels enough that the number of warps bounds the rows of partial sums, not the tokens.
            x, w = torch.zeros(4097, 1280, device="cuda", dtype=BF16), torch.zeros(1280, 4, device="cuda")
            causal_conv1d_bwd(x, w, x.clone())
            assert named(launches[-1])["rows"] < 4097 // 16
            return [(launch.library, *map(shape_of, launch.args)) for launch in launches]

    assert launched(78) == launched(114) == launched(132) == launched(148)


def test_documents_do_not_enter_the_partition() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        for lengths in ((4097,), (1, 4096), (0, *[1] * 97, 4000)):
            step(fake, 4097, 64, cu_seqlens=offsets(fake, *lengths))
    plans = {(named(launch)["blocks"], named(launch)["rows"]) for launch in launches if "bwd" in launch.library}
    assert len(plans) == 1


def test_fast_and_det_launch_the_same_program() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        for variant in ("det", "fast"):
            config.configure(cake_conv1d_variant=variant)
            step(fake, 133, 256)
    seen = [(launch.library, *map(shape_of, launch.args)) for launch in launches]
    assert seen[:2] == seen[2:]


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("activation", ["silu", "swish", None])
def test_activation_and_policy_reach_the_kernels(activation: str | None, policy: str) -> None:
    """The policy is read by the forward, for its backward, also under context parallelism."""
    other = {"bf16": "fp32", "fp32": "bf16"}[policy]
    with FakeCuda() as fake, recorded_launches() as launches:
        context = build_context_kcp(partition_kcp([0, 60], 1, "zigzag"), None, 0, "cuda")
        for call in (
            lambda x, w: causal_conv1d(x, w, activation=activation),
            lambda x, w: causal_conv1d_kcp(x, w, context, activation=activation),
        ):
            x, w = fake.cuda(normal(0, 60, 16)).requires_grad_(), fake.cuda(normal(1, 16, 4)).requires_grad_()
            config.configure(cake_conv1d_silu_grad_preactivation=policy)
            y = call(x, w)
            config.configure(cake_conv1d_silu_grad_preactivation=other)
            y.backward(torch.ones_like(y))
    silu = int(activation is not None)
    for launch in launches:
        given = named(launch)
        if given.get("edge") in (GATHER, FINAL_STATE):
            continue
        assert given["silu"] == silu, launch.library
        if "bwd" in launch.library or given.get("edge") in (HEAD_GRADIENT, TAIL_GRADIENT):
            assert given["rounded"] == int(policy == "bf16"), launch.library


@pytest.mark.parametrize("needs", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
def test_gradients_nobody_needs_are_not_asked_of_the_kernel(needs: tuple[bool, bool, bool]) -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = (
            fake.cuda(normal(0, 4097, 16)).requires_grad_(needs[0]),
            fake.cuda(normal(1, 16, 4)).requires_grad_(needs[1]),
        )
        state = fake.cuda(normal(2, 1, 3, 16)).requires_grad_(needs[2])
        y = causal_conv1d(x, w, initial_state=state)
        assert isinstance(y, Tensor)
        if any(needs):
            y.sum().backward()
    backward = [named(launch) for launch in launches if "bwd" in launch.library]
    edges = [named(launch)["edge"] for launch in launches if "halo" in launch.library]
    assert len(backward) == (needs[0] or needs[1])
    assert edges == [INITIAL_GRADIENT] * needs[2]
    for given in backward:
        assert tuple(given[name] is not None for name in ("dx", "dweight", "partial")) == (needs[0], needs[1], needs[1])


@pytest.mark.parametrize("shape", [(0, 16), (1, 0, 16), (3, 0, 16)])
def test_no_tokens_launch_nothing(shape: tuple[int, ...]) -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, *shape)).requires_grad_(), fake.cuda(normal(1, 16, 4)).requires_grad_()
        documents = shape[0] if len(shape) == 3 else 1
        state = fake.cuda(normal(2, documents, 3, 16)).requires_grad_()
        y, final = causal_conv1d(x, w, initial_state=state, output_final_state=True)
        torch.autograd.backward((y, final), (torch.empty_like(y), torch.ones_like(final)))
        assert x.grad is not None
        assert x.grad.shape == shape
        assert w.grad is not None
        assert not w.grad.any()
        assert device.device_of(w.grad) == ("cuda", 0)
        assert state.grad is not None
        assert (state.grad == 1).all()
        assert torch.equal(final.detach(), state.detach())
        assert final.data_ptr() != state.data_ptr()
    assert not launches


# --- layouts ----------------------------------------------------------------------------------------------------


def copies(fake: FakeCuda, call: Callable[[], object]) -> int:
    """Allocations that torch made for operands during ``call``; outputs and scratch are the runtime's."""
    before = len(fake.allocations)
    call()
    return sum(allocation.by == "torch" for allocation in fake.allocations[before:])


X_LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "column-slice": (lambda wide: wide[:, 64:320], 0),
    "leading-one": (lambda wide: wide[None, :, 64:320], 0),
    "batch-of-slices": (lambda wide: wide.view(3, 20, 640)[..., 64:320], 0),
    "one-token-with-an-odd-stride": (lambda wide: wide.as_strided((1, 256), (333, 1)), 0),
    "transposed": (lambda wide: wide[:, :256].contiguous().t().contiguous().t(), 1),
    "odd-token-stride": (lambda wide: wide.flatten()[: 60 * 260].view(60, 260)[:, :256], 1),
    "misaligned-base": (lambda wide: wide[:, 4:260], 1),
    "strided-columns": (lambda wide: wide[:, :512:2], 1),
    "batch-with-gaps": (lambda wide: wide.view(6, 10, 640)[::2, :, 64:320], 1),
}


@pytest.mark.parametrize("layout", X_LAYOUTS)
def test_x_is_read_in_place_or_copied_once(layout: str) -> None:
    """Spec 2.2; y is fresh and dense in every case."""
    take, wanted = X_LAYOUTS[layout]
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = take(fake.cuda(normal(0, 60, 640))), fake.cuda(normal(1, 256, 4))
        assert copies(fake, lambda: causal_conv1d(x, w)) == wanted
        given = named(launches[0])
        assert (given["x"].data_ptr() == x.data_ptr()) == (wanted == 0)
        assert_same_bits(given["x"].reshape(-1, 256), x.reshape(-1, 256), "the x that the kernel reads")
        assert given["y"].is_contiguous()


@pytest.mark.parametrize(("stride", "wanted"), [(12352, 0), (16480, 0), (1544, 0), (12354, 1)])
def test_a_projection_slice_is_read_in_place_forward_and_backward(stride: int, wanted: int) -> None:
    """Megatron's fused projection: token strides that are multiples of 8; the gradient slice as well."""
    with FakeCuda() as fake, recorded_launches() as launches:
        x, dy = (fake.cuda(normal(seed, 5, stride))[:, :512] for seed in range(2))
        w = fake.cuda(normal(2, 512, 4))
        assert copies(fake, lambda: causal_conv1d_fwd(x, w)) == wanted
        assert copies(fake, lambda: causal_conv1d_bwd(x, w, dy)) == 2 * wanted
        given = named(launches[-1])
        assert given["x"].stride() == given["dy"].stride() == ((stride if wanted == 0 else 512), 1)
        assert given["dx"].is_contiguous()


def test_an_expanded_or_foreign_gradient_is_copied_once() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 60, 256)), fake.cuda(normal(1, 256, 4))
        one = fake.cuda(torch.ones(1, 1, dtype=BF16))
        for dy in (
            one.expand(60, 256),
            fake.cuda(normal(2, 1, 256)).expand(60, 256),
            torch.ones(60, 256, device="cuda"),
        ):
            assert copies(fake, lambda dy=dy: causal_conv1d_bwd(x, w, dy)) == 1
            seen = named(launches[-1])["dy"]
            assert (seen.dtype, seen.stride()) == (BF16, (256, 1))
            assert_same_bits(seen, dy.to(BF16).contiguous(), "the dy that the kernel reads")


def test_a_weight_of_any_layout_reaches_the_kernel_dense() -> None:
    """[C, 1, W] is a view; a transposed or negated one is copied."""
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 60, 16)), fake.cuda(normal(1, 16, 4))
        for view in (w[:, None], w.t().contiguous().t(), torch._neg_view(w)):
            causal_conv1d(x, view)
            seen = named(launches[-1])["weight"]
            assert seen.is_contiguous()
            assert not seen.is_neg()
            assert torch.equal(seen, view.reshape(16, 4))


def test_outputs_that_the_kernel_cannot_write_in_place_are_refused() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 5, 256)), fake.cuda(normal(1, 256, 4))
        wide = torch.zeros(5, 264, device="cuda", dtype=BF16)
        assert causal_conv1d_fwd(x, w, out=wide[:, :256]).data_ptr() == wide.data_ptr()
        assert named(launches[0])["y"].stride() == (264, 1)
        for refused in (wide[:, 4:260], torch.zeros(256, 5, device="cuda", dtype=BF16).t()):
            with pytest.raises(ValueError, match="causal_conv1d_fwd: out is strided"):
                causal_conv1d_fwd(x, w, out=refused)
        main_grad = torch.full((256, 4), 7.0, device="cuda")
        assert causal_conv1d_bwd(x, w, x.clone(), dweight=main_grad)[1] is main_grad
        assert named(launches[-1])["dweight"].data_ptr() == main_grad.data_ptr()
        assert len(launches) == 2


def test_a_graph_that_saved_an_output_of_the_caller_notices_the_write() -> None:
    """A kernel is no operator of torch: without a word to autograd the backward would use the new content."""
    with FakeCuda() as fake, recorded_launches():
        x, w = fake.cuda(normal(0, 8, 16)), fake.cuda(normal(1, 16, 4))
        calls: dict[str, tuple[Tensor, Callable[[Tensor], object]]] = {
            "out": (x.clone(), lambda given: causal_conv1d_fwd(x, w, out=given)),
            "dx": (x.clone(), lambda given: causal_conv1d_bwd(x, w, x.clone(), dx=given)),
            "dweight": (w.clone(), lambda given: causal_conv1d_bwd(x, w, x.clone(), dweight=given)),
        }
        for given, call in calls.values():
            leaf = torch.ones_like(given).requires_grad_()
            product = leaf * given
            call(given)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


# --- states and fragments ---------------------------------------------------------------------------------------


def test_the_edges_of_documents_are_one_launch_each() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 60, 16)).requires_grad_(), fake.cuda(normal(1, 16, 4))
        state = fake.cuda(normal(2, 2, 3, 16, dtype=F32)).requires_grad_()
        cu = offsets(fake, 20, 40)
        y, final = causal_conv1d(x, w, cu, initial_state=state, output_final_state=True)
        assert (final.dtype, shape_of(final)) == (F32, (2, 3, 16))
        torch.autograd.backward((y, final), (torch.ones_like(y), torch.ones_like(final)))
        conv_final_state(x.detach(), 4, cu)
    programs = [(launch.library.split("_")[1], named(launch).get("edge")) for launch in launches]
    assert programs == [
        ("fwd", None),
        ("halo", FINAL_STATE),
        ("bwd", None),
        ("halo", INITIAL_GRADIENT),
        ("halo", FINAL_STATE),
    ]
    assert shape_of(named(launches[0])["history"]) == (6, 16)
    assert named(launches[2])["d_final"].is_contiguous()
    assert named(launches[4])["history"] is None


def test_the_exchange_runs_between_the_edges_and_the_rest() -> None:
    """Spec 3.4, overlap: gather, all but the heads, the heads; g of the heads, all but the tails, the tails."""
    with FakeCuda() as fake, recorded_launches() as launches:
        ranks_step(fake)
    found = [(launch.library.split("_")[1], named(launch).get("edge")) for launch in launches]
    forward = [("halo", GATHER), ("fwd", None), ("halo", HEAD_FORWARD)]
    assert found == [*forward, ("halo", HEAD_GRADIENT), ("bwd", None), ("halo", TAIL_GRADIENT)]
    gathered, main, heads, gradient, backward, tails = map(named, launches)
    assert main["skip"] is not None
    assert backward["skip"] is not None
    assert heads["out"].data_ptr() == main["y"].data_ptr()
    assert tails["out"].data_ptr() == backward["dx"].data_ptr()
    assert heads["history"].data_ptr() == gathered["out"].data_ptr(), "with one rank the gathered rows are the pool"
    assert (gradient["out"].dtype, gathered["out"].dtype) == (F32, BF16)


def test_several_tensors_share_the_rows_that_travel() -> None:
    """[rows, sum of C], read with its row stride and a column offset: no unpacking."""
    with FakeCuda() as fake, recorded_launches() as launches:
        ranks_step(fake, tensors=3)
    gathers = [named(launch)["out"] for launch in launches if named(launch).get("edge") == GATHER]
    assert [t.stride() for t in gathers] == [(48, 1)] * 3
    assert [t.data_ptr() - gathers[0].data_ptr() for t in gathers] == [0, 32, 64]


def test_a_context_on_another_device_is_refused() -> None:
    with FakeCuda(devices=2) as fake, recorded_launches() as launches:
        x, w = fake.cuda(normal(0, 60, 16), 1), fake.cuda(normal(1, 16, 4), 1)
        part = partition_kcp([0, 60], 1, "zigzag")
        for where in ("cuda:0", "cpu"):
            with pytest.raises(ValueError, match=r"causal_conv1d_kcp: .*cuda:1"):
                causal_conv1d_kcp(x, w, build_context_kcp(part, None, 0, where))
        assert not launches
