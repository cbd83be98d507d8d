"""Both ops under torch.compile: graphs, bits, symbolic sizes, errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._dynamo.testing
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.operands import normal
from cake_norms.gated_rmsnorm import rmsnorm_gate_bwd, rmsnorm_gate_fwd, rmsnorm_silu_gate
from cake_norms.rmsnorm import (
    ZeroCenteredRMSNorm,
    zero_centered_rmsnorm,
    zero_centered_rmsnorm_bwd,
    zero_centered_rmsnorm_fwd,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

rows = partial(normal, dtype=torch.float32)


@pytest.mark.parametrize("module", [True, False])
def test_compile_has_no_graph_break_and_the_eager_bits(module: bool) -> None:
    """N04: fullgraph, forward and backward, one graph for every number of rows."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    norm = ZeroCenteredRMSNorm(64, device="cpu")
    torch.nn.init.normal_(norm.weight, std=0.1)
    gate_weight = rows(2, 64).requires_grad_()

    def layer(x: Tensor, z: Tensor) -> Tensor:
        y = norm(x) if module else zero_centered_rmsnorm(x, norm.weight)
        return rmsnorm_silu_gate(y, z, gate_weight)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for count in (5, 9, 33):
        results = []
        for function in (layer, compiled):
            x, z = rows(0, count, 64).requires_grad_(), rows(1, count, 64).requires_grad_()
            for operand in (x, z):
                torch._dynamo.mark_dynamic(operand, 0)
            norm.weight.grad = gate_weight.grad = None
            y = function(x, z)
            y.square().sum().backward()
            results.append([y.detach(), x.grad, z.grad, norm.weight.grad, gate_weight.grad])
        for index, (a, b) in enumerate(zip(*results, strict=True)):
            assert_same_bits(b, a, f"compiled output {index} at {count} rows")
    assert counter.frame_count == 1


def test_compile_with_dynamic_shapes_has_a_graph_per_row_size_and_one_for_all_row_counts() -> None:
    """N04: dynamic=True makes the row size symbolic as well; the bits depend on it, so it is fixed in the graph."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return rmsnorm_silu_gate(zero_centered_rmsnorm(x, w), z, w)

    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    compilations = []
    for width in (64, 128):
        for count in (5, 9, 33):
            results = []
            for function in (layer, compiled):
                shapes = ((count, width), (count, width), (width,))
                leaves = [rows(seed, *shape).requires_grad_() for seed, shape in enumerate(shapes)]
                y = function(*leaves)
                y.square().sum().backward()
                results.append([y.detach(), *(leaf.grad for leaf in leaves)])
            for index, (a, b) in enumerate(zip(*results, strict=True)):
                assert_same_bits(b, a, f"compiled output {index} at [{count}, {width}]")
            compilations.append(counter.frame_count)
    first, second = compilations[0], compilations[-1]
    assert compilations == [first] * 3 + [second] * 3
    assert second > first


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, True), (False, False, True), (False,) * 3])
def test_compiled_passes_without_autograd_have_no_graph_break_and_the_eager_bits(needs: tuple[bool, ...]) -> None:
    """N04: they said that they were inside of a torch.func transform."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def passes(x: Tensor, z: Tensor, w: Tensor, eps: float) -> tuple[Tensor | None, ...]:
        y, rstd = zero_centered_rmsnorm_fwd(x, w, eps)
        gated = rmsnorm_gate_fwd(y, z, w, eps, activation="sigmoid")
        gate_grads = rmsnorm_gate_bwd(z, y, z, w, eps, activation="sigmoid", needs=(needs[0], needs[1], needs[2]))
        none = *zero_centered_rmsnorm_bwd(None, x, w, rstd), *rmsnorm_gate_bwd(None, x, z, w)
        return y, rstd, gated, *gate_grads, *zero_centered_rmsnorm_bwd(z, x, w, rstd, needs=needs[1:]), *none

    compiled = torch.compile(passes, fullgraph=True, backend=counter, dynamic=True)
    for count, eps in ((5, 1e-6), (9, 1e-6), (33, 1e-5)):
        operands = [rows(seed, *shape).requires_grad_() for seed, shape in enumerate(((count, 64), (count, 64), (64,)))]
        got, want = compiled(*operands, eps), passes(*operands, eps)
        assert [g is None for g in got] == [w is None for w in want]
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            if a is not None and b is not None:
                assert not a.requires_grad
                assert_same_bits(a, b, f"compiled output {index} at {count} rows")


def test_a_compiled_pass_names_the_operand_that_is_wrong() -> None:
    x, w = rows(0, 4, 64), rows(1, 64)
    texts = {  # apart from the calls, whose source lines the compiler quotes
        "weight": "weight is of 3 elements; needs the 64 of a row of x",
        "eps": "zero_centered_rmsnorm_fwd: eps is -1.0; needs at least 0.0",
        "dy": "dy is of shape (2, 64); needs the shape of x",
        "z": "z is of shape (2, 64); needs the shape of x, (4, 64)",
        "activation": "rmsnorm_gate_bwd: activation is 'relu'; needs one of",
        "needs": "rmsnorm_gate_bwd: needs is (True,); needs a tuple of 3 bool",
    }
    calls = {
        "weight": lambda: zero_centered_rmsnorm_fwd(x, w[:3]),
        "eps": lambda: zero_centered_rmsnorm_fwd(x, w, -1.0),
        "dy": lambda: zero_centered_rmsnorm_bwd(x[:2], x, w, x[:, 0]),
        "z": lambda: rmsnorm_gate_fwd(x, x[:2], w),
        "activation": lambda: rmsnorm_gate_bwd(x, x, x, w, activation="relu"),
        "needs": lambda: rmsnorm_gate_bwd(x, x, x, w, needs=(True,)),
    }
    for name, text in texts.items():
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
            torch.compile(calls[name], fullgraph=True, backend="aot_eager")()
        assert text in f"{caught.value} {caught.value.__cause__}".replace("\\'", "'")


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_symbolic_sizes_are_served_on_every_device(where: str) -> None:
    """N04: what the compiler asks of the operators, forward and backward, with fake operands of the device."""
    import cake_norms.gated_rmsnorm.custom_ops
    import cake_norms.rmsnorm.custom_ops  # noqa: F401

    operators = torch.ops.cake_norms
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def symbolic(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
        fake = mode.from_tensor(torch.empty(shape, dtype=dtype), symbolic_context=context)
        return fake.new_empty(fake.shape, device=where)

    x, dy, w = symbolic(6, 1000), symbolic(6, 1000), symbolic(1000)
    assert not isinstance(x.shape[1], int)
    y, rstd = operators.rmsnorm_fwd(x, w, 1e-6)
    dx, dw = operators.rmsnorm_bwd(dy, x, w, rstd, True, True)
    assert (y.shape, rstd.shape, dx.shape, dw.shape) == ((6, 1000), (6,), (6, 1000), (1000,))
    x, z, dy, w = symbolic(6, 3, 128), symbolic(6, 3, 128), symbolic(6, 3, 128), symbolic(128)
    y = operators.gate_fwd(x, z, w, 1e-6, "silu")
    dx, dz, dw = operators.gate_bwd(dy, x, z, w, 1e-6, "silu", True, True, True)
    assert y.shape == dx.shape == dz.shape == (6, 3, 128)
    assert dw.shape == (128,)
    if where == "cuda":
        with pytest.raises(ValueError, match="hidden_size is 1004"):
            operators.rmsnorm_fwd(symbolic(6, 1004), symbolic(1004), 1e-6)
        with pytest.raises(ValueError, match="head dim"):
            operators.gate_fwd(symbolic(6, 96), symbolic(6, 96), symbolic(96), 1e-6, "silu")
