"""``conv1d`` on a CUDA device: accuracy over channels, documents, dtypes, policies; layouts; autograd. Needs a GPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from cake_conv1d import causal_conv1d, causal_conv1d_bwd, causal_conv1d_fwd, conv_final_state
from cake_conv1d.testing import oracle
from cake_conv1d.testing.budgets import AGAINST_EXACT
from cake_conv1d.testing.shapes import document_lengths
from cake_conv1d.testing.steps import Step, assert_accurate, assert_same_step, make_step, offsets
from cake_core import configure
from cake_core.testing.gates import (
    assert_guards,
    assert_operands_untouched,
    assert_rel_rms,
    assert_same_bits,
    poisoned_empty,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]

CHANNELS = (8, 264, 1024, 1280, 4096, 8192, 10240, 12288)
EDGES = (0, 0, 1, 0, 2, 3, 0, 700, 0, 0, 33, 4, 0)
SHORT = ((1,), (63,), (64,), (65,), (1,) * 257, EDGES)
LONG = ((32771,), document_lengths(16384, 200, "log-uniform"))
BOTH = [("bfloat16", "bf16"), ("float32", "fp32")]


def _configure(policy: str = "bf16", variant: str = "det") -> None:
    configure(cake_conv1d_variant=variant, cake_conv1d_silu_grad_preactivation=policy)


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    _configure()
    yield
    configure()
    gc.collect()
    torch.cuda.empty_cache()


# ---- accuracy


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("weight", ["bfloat16", "float32"])
@pytest.mark.parametrize("channels", CHANNELS)
def test_short_packs_are_within_the_budgets(channels: int, weight: str, policy: str) -> None:
    _configure(policy)
    for lengths in SHORT:
        step = make_step(lengths, channels, device=DEVICE, weight=weight)
        assert_accurate(step.run(), step, f"[{sum(lengths)}, {channels}] of {len(lengths)} documents")


@pytest.mark.parametrize(("weight", "policy"), BOTH)
@pytest.mark.parametrize("channels", CHANNELS)
def test_long_packs_are_within_the_budgets(channels: int, weight: str, policy: str) -> None:
    _configure(policy)
    for lengths in LONG:
        step = make_step(lengths, channels, device=DEVICE, weight=weight)
        assert_accurate(step.run(), step, f"[{sum(lengths)}, {channels}] of {len(lengths)} documents")


@pytest.mark.parametrize(("weight", "policy"), BOTH)
def test_the_step_of_a_layer_is_within_the_budgets(weight: str, policy: str) -> None:
    """200 documents of 1 to 4096 tokens, x a slice of a fused projection."""
    _configure(policy)
    lengths = document_lengths(98304, 200, "log-uniform")
    step = make_step(lengths, 1280, device=DEVICE, weight=weight, x_stride=1544)
    assert_accurate(step.differentiate(), step, "[98304, 1280] of 200 documents")


@pytest.mark.parametrize("state", [None, "bfloat16", "float32"])
@pytest.mark.parametrize(("activation", "policy"), [("silu", "bf16"), ("silu", "fp32"), (None, "fp32")])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_width_activation_and_state(width: int, activation: str | None, policy: str, state: str | None) -> None:
    _configure(policy)
    for weight in ("bfloat16", "float32"):
        step = make_step(
            EDGES, 264, device=DEVICE, width=width, weight=weight, activation=activation, state=state, seed=width
        )
        assert_accurate(step.run(), step, f"W {width}, {weight} taps")


def test_the_policy_costs_what_it_may_against_the_exact_derivative() -> None:
    """Policy "bf16" is a choice, not an error: its size is bounded, and it is not zero."""
    step = make_step((8192,), 1024, device=DEVICE, weight="float32")
    exact = oracle.reference(step.x, step.weight, step.dy, policy="fp32")
    got = step.run()
    for name, budget in AGAINST_EXACT.items():
        assert_rel_rms(got[name], getattr(exact, name), budget.rel_rms, name)
    assert float((got["dweight"] - exact.dweight).norm() / exact.dweight.norm()) > 1e-4


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_a_weight_gradient_without_cancellation_is_summed_in_fp32_and_fp64(policy: str) -> None:
    """Regression class: partial sums kept in BF16. All terms have one sign, so such a sum stops growing."""
    _configure(policy)
    step = make_step((65536,), 1024, device=DEVICE, weight="float32")
    step = replace(step, x=step.x.abs(), weight=step.weight.abs(), dy=torch.ones_like(step.dy))
    assert_accurate(step.run(), step, "one sign")


@pytest.mark.parametrize(("tokens", "channels"), [(512, 768), (4099, 10240), (1026, 64), (1027, 64)])
def test_sizes_of_public_faults(tokens: int, channels: int) -> None:
    """fla 1156, causal-conv1d 67, vllm 10895: sizes at which others hung, read past the end or lost final states."""
    step = make_step((tokens,), channels, device=DEVICE, state="bfloat16" if channels == 64 else None)
    assert_accurate(step.run(), step, f"[{tokens}, {channels}]")


def test_infinities_saturate_and_overflow_is_no_nan() -> None:
    """pre = +Inf gives +Inf, -Inf gives NaN as silu does, a large negative one -0."""
    taps = torch.tensor([[0.0, 0.0, 0.0, 1.0]], device=DEVICE).expand(8, 4).contiguous()
    values = torch.tensor([math.inf, -math.inf, 3e38, -3e38, -100.0, 0.0, -0.0, 1.0], device=DEVICE).bfloat16()
    y = causal_conv1d_fwd(values.view(1, 8), taps)[0]
    assert y[0] == math.inf
    assert bool(y[1].isnan())
    assert y[2] == values[2]
    assert y[3] == 0
    assert bool(y[3].signbit())
    assert y[5] == 0
    assert y[7] == torch.sigmoid(torch.ones((), device=DEVICE)).bfloat16()


# ---- layouts


SLICES = [(8192, 12352, None), (10240, 16480, None), (1024, None, 3072), (4096, 12352, 12288), (264, 1024, 280)]


@pytest.mark.parametrize(("channels", "x_stride", "dy_stride"), SLICES)
def test_column_slices_have_the_bits_of_dense_operands(
    channels: int, x_stride: int | None, dy_stride: int | None
) -> None:
    """x as the projection leaves it, dy as a split of the next gradient; both read in place."""
    lengths = document_lengths(4099, 200, "log-uniform")
    step = make_step(lengths, channels, device=DEVICE, x_stride=x_stride, dy_stride=dy_stride)
    dense = replace(step, x=step.x.contiguous(), dy=step.dy.contiguous())
    assert_same_step(step.run(), dense.run(), f"C {channels}, strides {step.x.stride(0)} and {step.dy.stride(0)}")


def test_slices_are_read_in_place_and_other_layouts_copied_once() -> None:
    step = make_step((133,), 264, device=DEVICE)
    want = step.run()

    def allocations(x: Tensor) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        y = causal_conv1d_fwd(x, step.weight)
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert_same_bits(y, want["y"], f"y of strides {x.stride()}")
        return made

    for columns, first, copies in ((280, 8, 0), (272, 0, 0), (268, 4, 1), (280, 4, 1)):
        wide = torch.full((133, columns), math.nan, device=DEVICE, dtype=torch.bfloat16)
        x = wide[:, first : first + 264]
        x.copy_(step.x)
        assert allocations(x) == 1 + copies, f"column {first} of {columns}"
    assert allocations(step.x.t().contiguous().t()) == 2


def test_every_layout_of_the_gradient_has_the_bits_of_a_dense_one() -> None:
    """fla 871 and 1138: expanded, transposed and sliced gradients, states' included."""
    step = make_step((0, 1, 2, 130), 264, device=DEVICE, state="bfloat16")
    for name, dy in (
        ("expanded", torch.ones((), device=DEVICE, dtype=torch.bfloat16).expand(133, 264)),
        ("one row for all", step.dy[:1].expand(133, 264)),
        ("transposed", step.dy.t().contiguous().t()),
        ("fp32", step.dy.float()),
    ):
        dense = replace(step, dy=dy.bfloat16().contiguous())
        assert_same_step(replace(step, dy=dy).run(), dense.run(), f"dy {name}")


def test_a_batch_is_its_documents_packed() -> None:
    for batch, length in ((1, 133), (3, 65), (40, 1), (4, 0)):
        step = make_step((length,) * batch, 264, device=DEVICE, state="bfloat16")
        step = replace(step, cu=offsets((length,) * batch, DEVICE))
        shape = (batch, length, 264)
        whole = replace(step, x=step.x.view(shape), dy=step.dy.view(shape), cu=None)
        want, got = step.run(), whole.run()
        assert got["y"].shape == got["dx"].shape == shape
        flat = {name: value.view(want[name].shape) for name, value in got.items()}
        assert_same_step(flat, want, f"[{batch}, {length}, 264]")
        long = replace(step, cu=offsets((length,) * batch, DEVICE, torch.int64), weight=step.weight[:, None])
        got = long.run()
        assert_same_step(got | {"dweight": got["dweight"][:, 0]}, want, "int64 offsets and [C, 1, W] taps")


def test_outputs_fill_what_the_caller_gave_and_nothing_around_it() -> None:
    step = make_step((5, 32), 264, device=DEVICE)
    want = step.run()
    shapes = {"y": step.x, "dx": step.x, "dweight": step.weight}
    got = {name: poisoned_empty(like.shape, like.dtype, DEVICE) for name, like in shapes.items()}
    causal_conv1d_fwd(step.x, step.weight, step.cu, out=got["y"])
    causal_conv1d_bwd(step.x, step.weight, step.dy, step.cu, dx=got["dx"], dweight=got["dweight"])
    assert_same_step(got, want, "given outputs")
    for name, value in got.items():
        assert_guards(value, name)
    wide = torch.full((37, 288), 7.0, device=DEVICE, dtype=torch.bfloat16)
    causal_conv1d_fwd(step.x, step.weight, step.cu, out=wide[:, 8:272])
    assert_same_bits(wide[:, 8:272], want["y"], "y into columns")
    assert bool((wide[:, :8] == 7).all())
    assert bool((wide[:, 272:] == 7).all())
    flat = torch.full((264 * 4 + 3,), math.nan, device=DEVICE)  # FP32 main-grad at the alignment of one element
    main = flat[1:-2].view(264, 4)
    causal_conv1d_bwd(step.x, step.weight, step.dy, step.cu, dweight=main, needs=(False, True, False))
    assert_same_bits(main.bfloat16(), want["dweight"], "main grad")
    assert bool(flat[[0, -2, -1]].isnan().all())


def test_no_tokens() -> None:
    for lengths in ((0,), (0, 0, 0)):
        step = make_step(lengths, 264, device=DEVICE, state="float32")
        got = step.run()
        assert got["y"].shape == got["dx"].shape == (0, 264)
        assert not bool(got["dweight"].any())
        assert step.state is not None
        assert step.d_final is not None
        assert_same_bits(got["final_state"], step.state, "final_state")
        assert_same_bits(got["d_initial_state"], step.d_final, "d_initial_state")


# ---- autograd


@pytest.mark.parametrize("state", [None, "float32"])
def test_autograd_gives_what_the_functions_give_and_leaves_operands_alone(state: str | None) -> None:
    step = make_step(EDGES, 264, device=DEVICE, state=state)
    with assert_operands_untouched({"x": step.x, "weight": step.weight, "dy": step.dy, "cu": step.cu}):
        got = step.differentiate()
    assert_same_step(got, step.run(), "autograd")
    for needs in ((True, False), (False, True)):
        leaves = step.x.clone().requires_grad_(needs[0]), step.weight.clone().requires_grad_(needs[1])
        y = causal_conv1d(*leaves, step.cu)
        assert isinstance(y, Tensor)
        y.backward(step.dy)
        assert [leaf.grad is not None for leaf in leaves] == list(needs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_call_replays_the_same_bits(reentrant: bool) -> None:
    step = make_step((5, 128), 2048, device=DEVICE)
    leaves = step.x.clone().requires_grad_(), step.weight.clone().requires_grad_()
    y = checkpoint(causal_conv1d, *leaves, step.cu, use_reentrant=reentrant)
    assert isinstance(y, Tensor)
    dx, dweight = _grads(y, step.dy, leaves)
    assert_same_step({"y": y.detach(), "dx": dx, "dweight": dweight}, step.run(), "checkpoint")


def _grads(y: Tensor, dy: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    y.backward(dy)
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(found) == len(leaves)
    return found


def test_a_compiled_call_has_the_bits_of_the_eager_one() -> None:
    """Forward and backward in one graph without a break, and one compilation for every token count."""
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (133, 37, 1057):
        step: Step = make_step((5, tokens - 5), 264, device=DEVICE, seed=tokens)
        leaves = step.x.clone().requires_grad_(), step.weight.clone().requires_grad_()
        y = compiled(*leaves, step.cu)
        assert isinstance(y, Tensor)
        dx, dweight = _grads(y, step.dy, leaves)
        assert_same_step({"y": y.detach(), "dx": dx, "dweight": dweight}, step.run(), f"{tokens} tokens, compiled")


def test_the_final_state_is_what_the_differentiable_call_returns() -> None:
    step = make_step(EDGES, 264, device=DEVICE)
    y, final = causal_conv1d(step.x, step.weight, step.cu, output_final_state=True)
    assert_same_bits(y, step.run()["y"], "y")
    assert_same_bits(final, conv_final_state(step.x, 4, step.cu), "final_state")
