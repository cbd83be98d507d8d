"""The autograd Function: which gradients, what it saves, when it reads the policy, what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cake_conv1d import causal_conv1d, causal_conv1d_bwd, causal_conv1d_fwd
from cake_core import config
from cake_core.testing.gates import assert_operands_untouched, assert_same_bits
from cake_core.testing.operands import normal
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
CU = torch.tensor([0, 1, 1, 40], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def operands(dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    return normal(0, 40, 16, dtype=dtype), normal(1, 16, 4, dtype=dtype), normal(2, 3, 3, 16, dtype=dtype)


def call(x: Tensor, w: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    y = causal_conv1d(x, w, CU, initial_state=state, output_final_state=True)
    assert isinstance(y, tuple)
    return y


# --- which gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
def test_only_needed_gradients_are_there_and_have_the_bits_of_all(needs: tuple[bool, bool, bool]) -> None:
    dy, d_final = normal(3, 40, 16), normal(4, 3, 3, 16)
    all_of = [t.requires_grad_() for t in operands()]
    torch.autograd.backward(call(*all_of), (dy, d_final))
    leaves = [t.requires_grad_(need) for t, need in zip(operands(), needs, strict=True)]
    outputs = call(*leaves)
    if not any(needs):
        assert not any(output.requires_grad for output in outputs)
        return
    graded = [(o, g) for o, g in zip(outputs, (dy, d_final), strict=True) if o.requires_grad]
    torch.autograd.backward([o for o, _ in graded], [g for _, g in graded])
    for leaf, full, need in zip(leaves, all_of, needs, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            assert leaf.grad is not None
            assert full.grad is not None
            assert_same_bits(leaf.grad, full.grad, "gradient")
    x, w, state = operands()
    got = causal_conv1d_bwd(x, w, dy, CU, initial_state=state, d_final_state=d_final, needs=needs)
    for value, full, need in zip(got, all_of, needs, strict=True):
        assert (value is not None) == need
        if value is not None:
            assert full.grad is not None
            assert_same_bits(value, full.grad, "functional gradient")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_final_state_is_differentiable_in_what_it_depends_on(compiled: bool) -> None:
    """Not in the taps: with a frozen x, chunks have graphs of their own, and each may be freed by its backward."""
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    for name in ("x", "w", "state"):
        leaves = dict(zip(("x", "w", "state"), operands(), strict=True))
        leaves[name].requires_grad_()
        y, final = function(*leaves.values())
        assert y.requires_grad
        assert final.requires_grad == (name != "w"), name
    x, w, state = operands()
    w.requires_grad_()
    for _ in range(2):
        y, state = function(x, w, state)
        y.sum().backward()
    assert w.grad is not None


def test_an_output_that_nobody_uses_has_no_gradient_to_give() -> None:
    """Either output alone; a missing one is nothing, not a tensor of zeros that has to be made."""
    x, w, state = (t.requires_grad_() for t in operands())
    y, final = call(x, w, state)
    dy, d_final = normal(3, 40, 16), normal(4, 3, 3, 16)
    first = torch.autograd.grad(y, (x, w, state), dy, retain_graph=True)
    want = causal_conv1d_bwd(x.detach(), w.detach(), dy, CU, initial_state=state.detach())
    for got, wanted in zip(first, want, strict=True):
        assert wanted is not None
        assert_same_bits(got, wanted, "from y alone")
    dx, d_state = torch.autograd.grad(final, (x, state), d_final)
    zeros = torch.zeros_like(dy)
    want = causal_conv1d_bwd(x.detach(), w.detach(), zeros, CU, initial_state=state.detach(), d_final_state=d_final)
    for got, wanted in ((dx, want[0]), (d_state, want[2])):
        assert wanted is not None
        assert torch.equal(got, wanted)


def test_no_gradient_at_all_runs_nothing() -> None:
    """Spec 4: dy None gives None."""
    x, w, _ = operands()
    assert causal_conv1d_bwd(x, w, None, CU) == (None, None, None)
    assert causal_conv1d_bwd(x, w, x, CU, needs=(False, False, False)) == (None, None, None)
    assert causal_conv1d_bwd(x, w, x, CU)[2] is None, "no state, no gradient of one"


@pytest.mark.parametrize("taps", [BF16, F32])
def test_gradients_have_the_dtypes_of_their_operands(taps: torch.dtype) -> None:
    x, w, _ = operands()
    leaves = [x.requires_grad_(), w.to(taps).requires_grad_(), normal(2, 3, 3, 16, dtype=F32).requires_grad_()]
    y, final = call(*leaves)
    (y.float().sum() + final.sum()).backward()
    assert [leaf.grad.dtype for leaf in leaves if leaf.grad is not None] == [BF16, taps, F32]


def test_a_gradient_of_another_dtype_is_cast_once() -> None:
    x, w, _ = operands()
    dy = normal(3, 40, 16, dtype=F32)
    for got, want in zip(causal_conv1d_bwd(x, w, dy, CU), causal_conv1d_bwd(x, w, dy.to(BF16), CU), strict=True):
        if want is not None:
            assert got is not None
            assert_same_bits(got, want, "gradient")


def test_needs_are_read_from_the_operand_not_from_a_copy() -> None:
    """verl PR 7235: a non-contiguous x is copied inside; its gradient must still arrive."""
    base = normal(0, 16, 40).requires_grad_()
    _, w, _ = operands()
    causal_conv1d(base.t()[None], w).float().sum().backward()
    assert base.grad is not None
    assert base.grad.any()


def test_a_column_slice_of_a_projection_gives_its_columns_a_gradient() -> None:
    projection = normal(0, 40, 48).requires_grad_()
    _, w, _ = operands()
    dy = normal(3, 40, 16)
    causal_conv1d(projection[:, 16:32], w, CU).backward(dy)
    dx = causal_conv1d_bwd(projection.detach()[:, 16:32].contiguous(), w, dy, CU)[0]
    assert projection.grad is not None
    assert dx is not None
    assert_same_bits(projection.grad[:, 16:32].contiguous(), dx, "dx")
    assert not projection.grad[:, :16].any()
    assert not projection.grad[:, 32:].any()


# --- memory -----------------------------------------------------------------------------------------------------


def test_operands_and_a_shared_gradient_stay_untouched() -> None:
    """X06: forward and two backwards over retained buffers write into nothing of the caller's."""
    x, w, state = (t.requires_grad_() for t in operands())
    dy, d_final = normal(3, 40, 16), normal(4, 3, 3, 16)
    with assert_operands_untouched({"x": x, "w": w, "state": state, "dy": dy, "d_final": d_final, "cu": CU}):
        outputs = call(x, w, state)
        first = torch.autograd.grad(outputs, (x, w, state), (dy, d_final), retain_graph=True)
        second = torch.autograd.grad(outputs, (x, w, state), (dy, d_final))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b, "second backward")


def test_outputs_never_alias_an_operand() -> None:
    x, w, state = operands()
    empty = torch.zeros(4, dtype=torch.int32)
    _, final = causal_conv1d(x[:0], w, empty, initial_state=state, output_final_state=True)
    final.fill_(7)
    assert not (state == 7).any(), "the final state of an empty document is a copy of its initial state"
    y, final = causal_conv1d(x, w, CU, initial_state=state, activation=None, output_final_state=True)
    kept = x.clone(), state.clone()
    final.zero_()
    y.zero_()
    assert torch.equal(x, kept[0])
    assert torch.equal(state, kept[1])


def test_the_saved_tensors_are_the_operands_alone() -> None:
    """Spec 4: (x, weight, cu_seqlens, initial_state); y and the preactivation are recomputed or never needed."""
    x, w, state = (t.requires_grad_() for t in operands())
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y, _ = call(x, w, state)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, w, state, CU)}
    assert sum(t.nbytes for t in saved) == sum(t.nbytes for t in (x, w, state, CU))
    y.float().sum().backward()


def test_a_saved_operand_that_is_changed_is_noticed() -> None:
    x, w, _ = operands()
    leaf = x.clone().requires_grad_()
    for changed in (0, 1):
        middle, taps = leaf * 1, w.clone().requires_grad_() * 1
        y = causal_conv1d(middle, taps, CU)
        with torch.no_grad():
            (middle, taps)[changed].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.float().sum().backward()


def test_the_backward_has_a_gradient_for_every_argument_of_the_forward() -> None:
    """fla PR 1258: an argument more in the forward and none in the backward is seen without a GPU."""
    from cake_conv1d import autograd

    functions = [
        value
        for value in vars(autograd).values()
        if isinstance(value, type)
        and issubclass(value, torch.autograd.Function)
        and value.__module__ == autograd.__name__
    ]
    assert functions, "the op has an autograd Function"
    for function in functions:
        parameters = list(inspect.signature(function.forward).parameters.values())
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters), function
    x, w, state = (t.requires_grad_() for t in operands())
    y, final = call(x, w, state)
    node = y.grad_fn
    assert node is not None
    assert node is final.grad_fn, "one node for both outputs"
    graded = torch.autograd.grad((y.float().sum(), final.float().sum()), (x, w, state))
    assert [g.shape for g in graded] == [x.shape, w.shape, state.shape]


# --- configuration ----------------------------------------------------------------------------------------------


def test_the_backward_uses_the_policy_of_its_forward() -> None:
    x, w, _ = operands()
    dy = normal(3, 40, 16)

    def gradient(before: str, after: str) -> Tensor:
        leaf = w.float().requires_grad_()
        config.configure(cake_conv1d_silu_grad_preactivation=before)
        y = causal_conv1d(x, leaf, CU)
        config.configure(cake_conv1d_silu_grad_preactivation=after)
        return torch.autograd.grad(y, leaf, dy)[0]

    rounded, exact = gradient("bf16", "bf16"), gradient("fp32", "fp32")
    assert not torch.equal(rounded, exact)
    assert_same_bits(gradient("bf16", "fp32"), rounded, "dweight of a forward under bf16")
    assert_same_bits(gradient("fp32", "bf16"), exact, "dweight of a forward under fp32")
    config.configure(cake_conv1d_silu_grad_preactivation="fp32")
    functional = causal_conv1d_bwd(x, w.float(), dy, CU)[1]
    assert functional is not None
    assert_same_bits(functional, exact, "the functional backward reads the policy itself")


def test_an_unconfigured_process_rounds_the_preactivation() -> None:
    assert config.option("conv1d", "cake_conv1d_silu_grad_preactivation") == "bf16"


# --- replay -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_replay_gives_the_bits_of_the_plain_run(reentrant: bool) -> None:
    dy, d_final = normal(3, 40, 16), normal(4, 3, 3, 16)
    results = []
    for replay in (False, True):
        leaves = [t.requires_grad_() for t in operands()]
        outputs = checkpoint(call, *leaves, use_reentrant=reentrant) if replay else call(*leaves)
        torch.autograd.backward(outputs, (dy, d_final))
        results.append([*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b, "replayed")


# --- what it refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["a gradient that needs one", "ones", "a sum"])
def test_double_backward_is_refused(source: str) -> None:
    """Also where the gradient of y needs none itself: its own second derivative would be 0, the operands' is not."""
    x, w, _ = (t.requires_grad_() for t in operands(F64))
    dy = torch.ones_like(x).requires_grad_(source == "a gradient that needs one")
    y = causal_conv1d(x, w)
    y, grad = (y.sum(), None) if source == "a sum" else (y, dy)
    dx, dw = torch.autograd.grad(y, (x, w), grad, create_graph=True)
    for gradient in (dx, dw):
        with pytest.raises(RuntimeError, match="conv1d: a gradient is differentiated again; needs a first derivative"):
            torch.autograd.grad(gradient.square().sum(), (x, w), retain_graph=True, allow_unused=True)


def test_gradients_that_vmap_batches_are_refused() -> None:
    x, w, _ = (t.requires_grad_() for t in operands(F64))
    y = causal_conv1d(x, w)
    for call in (
        lambda: torch.autograd.grad(y, x, torch.stack((y, y)), is_grads_batched=True, retain_graph=True),
        lambda: torch.func.vmap(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(torch.stack((y, y))),
    ):
        with pytest.raises(RuntimeError, match="conv1d: a gradient is batched by vmap; needs one gradient a backward"):
            call()


def test_a_first_derivative_is_served_where_a_graph_is_made() -> None:
    x, w, state = (t.requires_grad_() for t in operands(F64))
    plain = torch.autograd.grad(causal_conv1d(x, w, CU, initial_state=state).sum(), (x, w, state))
    again = torch.autograd.grad(causal_conv1d(x, w, CU, initial_state=state).sum(), (x, w, state), create_graph=True)
    for a, b in zip(plain, again, strict=True):
        assert_same_bits(b.detach(), a, "gradient")


@pytest.mark.parametrize("transform", ["vmap", "grad", "dual"])
def test_a_call_inside_a_transform_is_refused_by_name(transform: str) -> None:
    x, w, _ = operands(F32)
    if transform == "dual":
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"causal_conv1d: x .*forward-mode"):
            causal_conv1d(forward_ad.make_dual(x, x), w)
        return
    functions: dict[str, Any] = {
        "vmap": torch.func.vmap(lambda row: causal_conv1d(row, w)),
        "grad": torch.func.grad(lambda t: causal_conv1d(t, w).sum()),
    }
    with pytest.raises(RuntimeError, match=r"causal_conv1d: x .*torch\.func transform"):
        functions[transform](x[None] if transform == "vmap" else x)


def test_autocast_changes_nothing() -> None:
    x, w, _ = operands()
    with torch.autocast("cpu", BF16):
        inside = causal_conv1d(x, w, CU)
        wide = causal_conv1d(x.float(), w, CU)
    assert_same_bits(inside, causal_conv1d(x, w, CU), "y")
    assert wide.dtype == F32


def test_the_functional_calls_record_no_graph() -> None:
    x, w, state = (t.requires_grad_() for t in operands())
    assert not causal_conv1d_fwd(x, w, CU, initial_state=state).requires_grad
    assert not any(g.requires_grad for g in causal_conv1d_bwd(x, w, x, CU, initial_state=state) if g is not None)
