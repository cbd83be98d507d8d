"""The op on the CPU: definition, gradients, strides, errors, torch.compile. Bits and routes: the op contract."""

from __future__ import annotations

import subprocess
import sys

import cake___op__
import pytest
import torch
from cake___op__ import __op__, __op___bwd, __op___fwd
from cake___op__.op import check_supported, is_supported
from cake___op__.testing.oracle import squared_relu
from torch import Tensor


def operands(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x, dy


def test_importing_the_package_its_declaration_and_its_plan_loads_no_torch() -> None:
    modules = ("cake___op__", "cake___op__.op", "cake___op__.plan")
    code = f"import sys; sys.path[:] = {sys.path!r}; import {', '.join(modules)}; assert 'torch' not in sys.modules"
    subprocess.run((sys.executable, "-c", code), check=True)


def test_public_names_are_listed() -> None:
    assert set(cake___op__.__all__) <= set(dir(cake___op__))


def test_gradients_agree_with_finite_differences() -> None:
    x, _ = operands(3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(__op__, x.requires_grad_())


def test_bf16_results_are_the_definition_rounded_once() -> None:
    x, dy = operands(33, 65)
    want = squared_relu(x, dy)
    assert torch.equal(__op___fwd(x), want["y"].float().bfloat16())
    assert torch.equal(__op___bwd(dy, x), want["dx"].float().bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (2, 3, 4)])
def test_every_shape_is_served(shape: tuple[int, ...]) -> None:
    x, dy = operands(*shape)
    x.requires_grad_()
    y = __op__(x)
    y.backward(dy)
    assert x.grad is not None
    assert y.shape == x.grad.shape == shape


def test_strided_operands_give_the_bits_of_contiguous_ones() -> None:
    x, dy = (operand.t() for operand in operands(6, 9))
    assert torch.equal(__op___fwd(x), __op___fwd(x.contiguous()))
    assert torch.equal(__op___bwd(dy, x), __op___bwd(dy.contiguous(), x.contiguous()))
    assert __op___fwd(x).is_contiguous()
    assert torch.equal(__op___bwd(dy[:1].expand(9, 6), x), __op___bwd(dy[:1].repeat(9, 1), x))


def test_operands_are_left_as_they_were_and_a_second_backward_gives_the_same_bits() -> None:
    x, dy = operands(4, 8)
    kept = x.clone(), dy.clone()
    leaf = x.requires_grad_()
    y = __op__(leaf)
    first, second = (torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(x, kept[0])
    assert torch.equal(dy, kept[1])
    assert x._version == dy._version == 0


def test_nan_stays_nan_in_its_own_element() -> None:
    x = torch.tensor([-1.0, float("nan"), 2.0, float("inf")], dtype=torch.bfloat16)
    assert __op___fwd(x).isnan().tolist() == [False, True, False, False]


def test_compiled_calls_trace_without_a_break_and_keep_the_bits() -> None:
    x, dy = operands(4, 8)
    results = []
    for function in (__op__, torch.compile(__op__, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    assert all(map(torch.equal, *results))


def test_meta_operands_give_meta_results() -> None:
    x = torch.empty(3, 4, dtype=torch.bfloat16, device="meta")
    assert __op___fwd(x).shape == __op___bwd(x, x).shape == (3, 4)


def test_a_second_derivative_is_refused() -> None:
    x, dy = (operand.requires_grad_() for operand in operands(3, dtype=torch.float64))
    (dx,) = torch.autograd.grad(__op__(x), x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda x: __op__([1.0]), TypeError, "__op__: x is list; needs a torch.Tensor"),
        (lambda x: __op__(x.half()), ValueError, "__op__: x.dtype is torch.float16; needs bfloat16"),
        (lambda x: __op___fwd(x.long()), ValueError, "__op___fwd: x.dtype is torch.int64"),
        (lambda x: __op___bwd(None, x), TypeError, "__op___bwd: dy is NoneType"),
        (lambda x: __op___bwd(x[:1], x), ValueError, "__op___bwd: dy.shape is"),
        (lambda x: __op___bwd(x.float(), x), ValueError, "__op___bwd: dy.dtype is torch.float32; needs x.dtype"),
        (lambda x: check_supported("float16"), ValueError, "dtype is 'float16'"),
        (lambda x: check_supported(16), TypeError, "dtype is 16"),
        (lambda x: check_supported(arch="sm_75"), NotImplementedError, "arch is 'sm_75'"),
        (lambda x: check_supported("float32", arch="sm_90a"), NotImplementedError, "bfloat16 on sm_90a"),
    ],
)
def test_misuse_is_refused_by_name(call, kind, text) -> None:
    x, _ = operands(2, 4)
    with pytest.raises(kind) as caught:
        call(x)
    assert text in str(caught.value)


def test_what_is_served_is_said() -> None:
    assert is_supported()
    assert is_supported("float32", arch="cpu")
    assert not is_supported("float32", arch="sm_80")
