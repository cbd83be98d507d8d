"""Both ops in autograd: which gradients, what is kept, checkpointing, refusals, meta tensors, autocast."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._dynamo.testing
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.operands import normal
from cake_norms.gated_rmsnorm import rmsnorm_gate, rmsnorm_gate_bwd, rmsnorm_silu_gate
from cake_norms.rmsnorm import (
    zero_centered_rmsnorm,
    zero_centered_rmsnorm_bwd,
    zero_centered_rmsnorm_fwd,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

rows = partial(normal, dtype=torch.float32)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_only_the_gradients_that_are_needed(needs: tuple[bool, bool]) -> None:
    x = rows(0, 6, 64).requires_grad_(needs[0])
    w = rows(1, 64).requires_grad_(needs[1])
    dy = rows(2, 6, 64)
    zero_centered_rmsnorm(x, w).backward(dy)
    assert (x.grad is not None, w.grad is not None) == needs
    _, rstd = zero_centered_rmsnorm_fwd(x, w)
    full = zero_centered_rmsnorm_bwd(dy, x, w, rstd)
    part = zero_centered_rmsnorm_bwd(dy, x, w, rstd, needs=needs)
    for got, want, needed, grad in zip(part, full, needs, (x.grad, w.grad), strict=True):
        assert (got is not None) == needed
        if needed:
            assert_same_bits(got, want, "gradient")
            assert_same_bits(grad, want, "autograd's gradient")


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)])
def test_only_the_gated_gradients_that_are_needed(needs: tuple[int, int, int]) -> None:
    wanted = tuple(map(bool, needs))
    operands = [rows(0, 6, 64), rows(1, 6, 64), rows(2, 64)]
    for operand, need in zip(operands, wanted, strict=True):
        operand.requires_grad_(need)
    dy = rows(3, 6, 64)
    rmsnorm_silu_gate(*operands).backward(dy)
    assert tuple(operand.grad is not None for operand in operands) == wanted
    part = rmsnorm_gate_bwd(dy, *operands, needs=wanted)
    full = rmsnorm_gate_bwd(dy, *operands)
    for got, want, need in zip(part, full, wanted, strict=True):
        assert (got is not None) == need
        if need:
            assert_same_bits(got, want, "gradient")


def test_needs_are_read_from_the_operand_not_from_a_copy() -> None:
    """A non-contiguous x is copied inside; its gradient must still arrive."""
    base = rows(0, 64, 6).requires_grad_()
    zero_centered_rmsnorm(base.t(), torch.zeros(64)).sum().backward()
    assert base.grad is not None
    assert base.grad.any()


def test_operands_and_a_shared_gradient_stay_untouched() -> None:
    """X06: forward and two backwards over retained buffers write into nothing of the caller's."""
    x, z, w = rows(0, 6, 64).requires_grad_(), rows(1, 6, 64).requires_grad_(), rows(2, 64).requires_grad_()
    dy = rows(3, 6, 64)
    for y, operands in ((zero_centered_rmsnorm(x, w), (x, w)), (rmsnorm_silu_gate(x, z, w), (x, z, w))):
        before = [(t.detach().clone(), t._version) for t in (*operands, dy)]
        first = torch.autograd.grad(y, operands, dy, retain_graph=True)
        second = torch.autograd.grad(y, operands, dy)
        for a, b in zip(first, second, strict=True):
            assert_same_bits(a, b, "second backward")
        for t, (bits, version) in zip((*operands, dy), before, strict=True):
            assert_same_bits(t.detach(), bits, "operand")
            assert t._version == version


def test_the_output_never_aliases_its_input() -> None:
    x = rows(0, 6, 64)
    assert zero_centered_rmsnorm(x, torch.zeros(64)).data_ptr() != x.data_ptr()


def test_double_backward_is_refused() -> None:
    x = rows(0, 4, 64).requires_grad_()
    w = rows(1, 64).requires_grad_()
    z = rows(2, 4, 64).requires_grad_()
    calls = {
        "rmsnorm": lambda: zero_centered_rmsnorm(x, w),
        "gated_rmsnorm": lambda: rmsnorm_gate(x, z, w),
    }
    for name, call in calls.items():
        for gradient in torch.autograd.grad(call().sum(), (x, w), create_graph=True):
            with pytest.raises(RuntimeError, match=f"{name}: a gradient is differentiated again; needs"):
                gradient.square().sum().backward(retain_graph=True)


def test_gradients_that_vmap_batches_are_refused() -> None:
    x, z, w = (t.requires_grad_() for t in (rows(0, 4, 64), rows(1, 4, 64), rows(2, 64)))
    for name, y in (("rmsnorm", zero_centered_rmsnorm(x, w)), ("gated_rmsnorm", rmsnorm_gate(x, z, w))):
        with pytest.raises(RuntimeError, match=f"{name}: a gradient is batched by vmap; needs one gradient a backward"):
            torch.autograd.grad(y, x, torch.stack((y, y)), is_grads_batched=True)


def test_a_default_device_of_torch_changes_nothing() -> None:
    """The CPU backends make what they need where the operands are."""
    x, z, w = (t.requires_grad_() for t in (rows(0, 4, 64), rows(1, 4, 64), rows(2, 64)))
    with torch.device("meta"):
        zero_centered_rmsnorm(x, w).backward(x.detach())
        rmsnorm_gate(x, z, w).backward(x.detach())
    assert x.grad is not None
    assert x.grad.device.type == "cpu"


def test_forward_mode_and_vmap_are_refused() -> None:
    x, w = rows(0, 4, 64), rows(1, 64)
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda t: zero_centered_rmsnorm(t, w), (x,), (x,))
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda t: zero_centered_rmsnorm(t, w))(x[:, None])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_replay_gives_the_bits_of_the_plain_run(reentrant: bool) -> None:
    x, z, w = rows(0, 6, 64), rows(1, 6, 64), rows(2, 64)

    def layer(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return rmsnorm_silu_gate(zero_centered_rmsnorm(x, w), z, w)

    results = []
    for replay in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, z, w)]
        y = checkpoint(layer, *leaves, use_reentrant=reentrant) if replay else layer(*leaves)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b, "replayed")


def test_meta_tensors_have_shapes_and_types() -> None:
    x = torch.empty(5, 3, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    w = torch.empty(64, device="meta", requires_grad=True)
    y = rmsnorm_silu_gate(zero_centered_rmsnorm(x, w), x, w)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, torch.bfloat16, "meta")
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert (w.grad.shape, w.grad.dtype) == (w.shape, torch.float32)


def test_autocast_changes_nothing() -> None:
    x, w = rows(0, 4, 64, dtype=torch.bfloat16), rows(1, 64)
    with torch.autocast("cpu", torch.bfloat16):
        inside = zero_centered_rmsnorm(x, w)
    assert_same_bits(inside, zero_centered_rmsnorm(x, w), "y")
