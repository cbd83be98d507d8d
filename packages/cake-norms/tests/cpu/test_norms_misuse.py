"""Operands that the kernels cannot read as they are (wrappers, negated views, sparse ones); outputs that were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from cake_core import config
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.launches import Launch, recorded_launches
from cake_core.testing.traced import assert_refused_in_graphs
from cake_norms.gated_rmsnorm import rmsnorm_gate, rmsnorm_gate_bwd, rmsnorm_gate_fwd
from cake_norms.rmsnorm import zero_centered_rmsnorm, zero_centered_rmsnorm_bwd, zero_centered_rmsnorm_fwd
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

BF16 = torch.bfloat16


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    config.configure()
    with recorded_launches() as found:
        yield found


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def results(fake: FakeCuda) -> dict[str, tuple[Tensor, Callable[[Tensor], Any]]]:
    """Every output that a caller may give -> (a tensor for it, the call that writes it)."""
    x, w = fake.cuda(normal(8, 64)), fake.cuda(normal(64, dtype=torch.float32))
    rstd = fake.cuda(torch.ones(8))
    return {
        "out": (x.clone(), lambda given: zero_centered_rmsnorm_fwd(x, w, out=given)),
        "rstd": (rstd.clone(), lambda given: zero_centered_rmsnorm_fwd(x, w, rstd=given)),
        "dx": (x.clone(), lambda given: zero_centered_rmsnorm_bwd(x, x, w, rstd, dx=given)),
        "dweight": (w.clone(), lambda given: zero_centered_rmsnorm_bwd(x, x, w, rstd, dweight=given)),
        "gated out": (x.clone(), lambda given: rmsnorm_gate_fwd(x, x, w, out=given)),
        "gated dx": (x.clone(), lambda given: rmsnorm_gate_bwd(x, x, x, w, dx=given)),
        "gated dz": (x.clone(), lambda given: rmsnorm_gate_bwd(x, x, x, w, dz=given)),
        "gated dweight": (w.clone(), lambda given: rmsnorm_gate_bwd(x, x, x, w, dweight=given)),
    }


OUTPUTS = ("out", "rstd", "dx", "dweight", "gated out", "gated dx", "gated dz", "gated dweight")


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_graph_that_saved_an_output_of_the_caller_notices_the_write(name: str, launches: list[Launch]) -> None:
    """A kernel is no operator of torch: without a word to autograd the backward would use the new content."""
    with FakeCuda() as fake:
        given, call = results(fake)[name]
        leaf = torch.ones_like(given).requires_grad_()
        product = leaf * given  # saves the tensor that the kernel is about to write
        call(given)
        assert launches
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_made_in_inference_mode_are_written(name: str, launches: list[Launch]) -> None:
    """They have no version to count."""
    with FakeCuda() as fake, torch.inference_mode():
        given, call = results(fake)[name]
        call(given)
        assert len(launches) == 1


def wrapper(value: Tensor) -> Tensor:
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    return collectives.AsyncCollectiveTensor(value)


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_without_memory_of_its_own_is_refused(name: str, launches: list[Launch]) -> None:
    with FakeCuda() as fake:
        given, call = results(fake)[name]
        with pytest.raises(ValueError, match="without memory of its own"):
            call(wrapper(given))
        with pytest.raises(ValueError, match="a negated view"):
            call(torch._neg_view(given))
    assert not launches


def test_a_negated_weight_reaches_the_kernel_with_its_values(launches: list[Launch]) -> None:
    """The memory of the view holds the negatives."""
    with FakeCuda() as fake:
        x, w = fake.cuda(normal(8, 64)), fake.cuda(normal(64, dtype=torch.float32))
        zero_centered_rmsnorm(x, torch._neg_view(w))
        rmsnorm_gate(x, x, torch._neg_view(w))
        for launch, position in zip(launches, (3, 3), strict=True):
            assert not launch.args[position].is_neg()
            assert torch.equal(launch.args[position], -w)


@pytest.mark.parametrize("layout", ["strided", "expanded", "negated"])
def test_an_rstd_of_any_layout_reaches_the_kernel_dense(layout: str, launches: list[Launch]) -> None:
    """The CPU takes it too; the kernel reads one FP32 after the other."""
    with FakeCuda() as fake:
        x, w, wide = fake.cuda(normal(8, 64)), fake.cuda(normal(64)), fake.cuda(normal(16, dtype=torch.float32))
        rstd = {"strided": wide[::2], "expanded": wide[:1].expand(8), "negated": torch._neg_view(wide[:8])}[layout]
        zero_centered_rmsnorm_bwd(x, x, w, rstd)
        got = launches[-1].args[6]
        assert got.is_contiguous()
        assert not got.is_neg()
        assert torch.equal(got, rstd)


@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_mkldnn], ids=["sparse", "mkldnn"])
def test_an_operand_without_strides_is_refused(convert: Callable[[Tensor], Tensor]) -> None:
    x, w = normal(4, 64, dtype=torch.float32), normal(64, dtype=torch.float32)
    rstd = zero_centered_rmsnorm_fwd(x, w)[1]
    for call, name in (
        (lambda: zero_centered_rmsnorm(convert(x), w), "x"),
        (lambda: zero_centered_rmsnorm_bwd(convert(x), x, w, rstd), "dy"),
        (lambda: rmsnorm_gate(x, convert(x), w), "z"),
    ):
        with pytest.raises(ValueError, match=rf": {name} is of layout torch\.\w+; needs torch.strided"):
            call()


def _traced(call: Callable[..., Any], *operands: Tensor) -> Any:
    """What the graph computes that a tracer of fake tensors records."""
    return make_fx(call, tracing_mode="fake")(*operands)(*operands)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: zero_centered_rmsnorm(x, w),
        lambda x, w: zero_centered_rmsnorm_fwd(x, w),
        lambda x, w: zero_centered_rmsnorm_bwd(x * 2, x, w, zero_centered_rmsnorm_fwd(x, w)[1]),
        lambda x, w: rmsnorm_gate(x, x * 2, w),
        lambda x, w: rmsnorm_gate_fwd(x, x * 2, w),
        lambda x, w: rmsnorm_gate_bwd(x * 2, x, x * 3, w, needs=(True, False, True)),
    ],
)
def test_a_tracer_of_fake_tensors_records_the_computation(call: Callable[..., Any]) -> None:
    """Not an allocation alone, whose content is anything."""
    x, w = normal(5, 64, dtype=torch.float32), normal(64, dtype=torch.float32)
    got, want = (value if isinstance(value, tuple) else (value,) for value in (_traced(call, x, w), call(x, w)))
    assert len(got) == len(want)
    for g, expected in zip(got, want, strict=True):
        assert (g is None) == (expected is None)
        assert g is None or torch.equal(g, expected)


X, W, R = torch.ones(6, 8), torch.ones(8), torch.ones(6)
GIVEN: dict[str, Callable[..., Any]] = {
    "out": lambda given: zero_centered_rmsnorm_fwd(X, W, out=given),
    "rstd": lambda given: zero_centered_rmsnorm_fwd(X, W, rstd=given),
    "dx": lambda given: zero_centered_rmsnorm_bwd(X, X, W, R, dx=given),
    "dweight": lambda given: zero_centered_rmsnorm_bwd(X, X, W, R, dweight=given),
    "gated out": lambda given: rmsnorm_gate_fwd(X, X, W, out=given),
    "gated dx": lambda given: rmsnorm_gate_bwd(X, X, X, W, dx=given),
    "gated dz": lambda given: rmsnorm_gate_bwd(X, X, X, W, dz=given),
    "gated dweight": lambda given: rmsnorm_gate_bwd(X, X, X, W, dweight=given),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_given_output_is_refused_where_a_graph_is_made(name: str) -> None:
    """A graph would lack the writes, and the message was of a torch.func transform. Outside of graphs it is served."""
    torch._dynamo.reset()
    call, argument = GIVEN[name], name.split()[-1]
    given = torch.full({"rstd": (6,), "dweight": (8,)}.get(argument, (6, 8)), 7.0)
    assert_refused_in_graphs(call, argument, given)


def test_the_result_of_a_running_collective_is_differentiable() -> None:
    """The registered operator waits for it, in the forward and in the backward."""
    x, w = normal(5, 64), normal(64).requires_grad_()
    assert torch.equal(zero_centered_rmsnorm(wrapper(x), w), zero_centered_rmsnorm(x, w))
    y = zero_centered_rmsnorm(x, w)
    y.backward(wrapper(x))
    got, w.grad = w.grad, None
    zero_centered_rmsnorm(x, w).backward(x)
    assert got is not None
    assert w.grad is not None
    assert torch.equal(got, w.grad)


def test_a_tensor_that_left_its_transform_is_differentiated_where_it_came_from() -> None:
    """torch.func.grad leaves a wrapper behind whose own graph is gone."""
    left: list[Tensor] = []
    w = normal(64, dtype=torch.float32).requires_grad_()
    for call in (lambda x: zero_centered_rmsnorm(x, w), lambda x: rmsnorm_gate(x, x, w)):
        inside, outside = (normal(5, 64, dtype=torch.float32).requires_grad_() for _ in range(2))
        torch.func.grad(lambda x: (left.append(x * 1), x.sum())[1])(inside)
        call(left.pop()).sum().backward()
        call(outside).sum().backward()
        assert inside.grad is not None
        assert outside.grad is not None
        assert torch.equal(inside.grad, outside.grad)


@pytest.mark.parametrize("transform", ["vmap", "grad", "dual"])
@pytest.mark.parametrize("op", [zero_centered_rmsnorm, lambda x, w: rmsnorm_gate(x, x, w)], ids=["rmsnorm", "gated"])
def test_a_call_inside_a_transform_is_refused_by_name(op: Callable[[Tensor, Tensor], Tensor], transform: str) -> None:
    """Before anything runs: the program would read a wrapper's memory, or drop the tangent."""
    x, w = normal(5, 64), normal(64)
    if transform == "dual":
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r": x is a forward-mode dual tensor"):
            op(forward_ad.make_dual(x, x), w)
        return
    call = {"vmap": torch.func.vmap(lambda row: op(row, w)), "grad": torch.func.grad(lambda x: op(x, w).sum())}
    with pytest.raises(RuntimeError, match=r": x is inside a torch\.func transform"):
        call[transform](x)
