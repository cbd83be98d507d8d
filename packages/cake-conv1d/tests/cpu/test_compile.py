"""Tensors without memory, tracers and torch.compile: the registered operators of the op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from cake_conv1d import causal_conv1d, causal_conv1d_bwd, causal_conv1d_fwd, conv_final_state
from cake_core import config
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.operands import normal
from cake_core.testing.traced import assert_refused_in_graphs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    torch._dynamo.reset()
    yield
    config.configure()


def test_meta_tensors_have_shapes_and_types() -> None:
    """No contents: offsets of any value, states and gradients in the dtypes of their operands."""
    x = torch.empty(50, 16, device="meta", dtype=BF16, requires_grad=True)
    w = torch.empty(16, 1, 4, device="meta", requires_grad=True)
    state = torch.empty(3, 3, 16, device="meta", requires_grad=True)
    cu = torch.empty(4, device="meta", dtype=torch.int32)
    y, final = causal_conv1d(x, w, cu, initial_state=state, output_final_state=True)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, BF16, "meta")
    assert (final.shape, final.dtype) == (state.shape, F32)
    (y.float().sum() + final.sum()).backward()
    for leaf in (x, w, state):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)
    batch = torch.empty(2, 5, 8, device="meta", dtype=BF16)
    assert causal_conv1d(batch, w[:8].detach()).shape == (2, 5, 8)
    assert conv_final_state(batch, 4).shape == (2, 3, 8)
    with pytest.raises(ValueError, match="initial_state"):
        causal_conv1d(x, w, cu, initial_state=state[:2])


def test_fake_tensors_of_cuda_need_no_device() -> None:
    with FakeTensorMode():
        x, w = torch.empty(50, 16, dtype=BF16, device="cuda"), torch.empty(16, 4, device="cuda")
        cu = torch.empty(4, dtype=torch.int64, device="cuda")
        y, final = causal_conv1d(x, w, cu, output_final_state=True)
        dx, dw, _ = causal_conv1d_bwd(x, w, y, cu, needs=(True, True, False))
    assert (y.shape, y.dtype, y.device.type) == (x.shape, BF16, "cuda")
    assert (final.shape, final.dtype) == ((3, 3, 16), BF16)
    assert dx is not None
    assert dw is not None
    assert (dx.dtype, dw.dtype, dw.shape) == (BF16, F32, (16, 4))


TRACED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "fwd": lambda x, w, cu: causal_conv1d_fwd(x, w, cu),
    "no-offsets": lambda x, w, cu: causal_conv1d_fwd(x, w),
    "bwd": lambda x, w, cu: causal_conv1d_bwd(x, w, x * 2, cu, needs=(True, True, False)),
    "dx-alone": lambda x, w, cu: causal_conv1d_bwd(x, w, x * 2, cu, needs=(True, False, False)),
    "autograd-entry": lambda x, w, cu: causal_conv1d(x, w, cu, output_final_state=True),
    "final-state": lambda x, w, cu: conv_final_state(x, 4, cu),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_tracer_of_fake_tensors_records_the_computation(name: str) -> None:
    """Not an allocation alone, whose content is anything."""
    call = TRACED[name]
    operands = normal(0, 20, 8, dtype=F32), normal(1, 8, 4, dtype=F32), torch.tensor([0, 1, 20], dtype=torch.int32)
    traced = make_fx(call, tracing_mode="fake")(*operands)
    other = normal(2, 20, 8, dtype=F32), normal(3, 8, 4, dtype=F32), torch.tensor([0, 15, 20], dtype=torch.int32)
    got, want = (value if isinstance(value, tuple) else (value,) for value in (traced(*other), call(*other)))
    assert len(got) == len(want)
    for g, expected in zip(got, want, strict=True):
        assert (g is None) == (expected is None)
        assert g is None or torch.equal(g, expected)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", TRACED)
def test_a_tracer_records_the_operator(name: str, mode: str) -> None:
    """Of plain tensors too: a launch on CUDA left uninitialised memory in the graph, the CPU one set of offsets."""
    operands = normal(0, 20, 8, dtype=F32), normal(1, 8, 4, dtype=F32), torch.tensor([0, 1, 20], dtype=torch.int32)
    graph = make_fx(TRACED[name], tracing_mode=mode)(*operands).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert any(target.startswith("cake_conv1d.") for target in targets), targets
    assert not any("empty" in target for target in targets), targets


X, W = torch.ones(6, 8), torch.ones(8, 4)
GIVEN: dict[str, Callable[..., Any]] = {
    "out": lambda given: causal_conv1d_fwd(X, W, out=given),
    "dx": lambda given: causal_conv1d_bwd(X, W, X, dx=given),
    "dweight": lambda given: causal_conv1d_bwd(X, W, X, dweight=given),
    "dx-of-no-gradient": lambda given: causal_conv1d_bwd(X, W, None, dx=given),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_given_output_is_refused_where_a_graph_is_made(name: str) -> None:
    """A graph would lack the writes: make_fx returned what the output held. Outside of graphs it is served."""
    call, argument = GIVEN[name], name.split("-")[0]
    given = torch.full((8, 4) if argument == "dweight" else (6, 8), 7.0)
    assert_refused_in_graphs(call, argument, given)


def test_a_compiled_backward_without_a_gradient_has_none() -> None:
    for cu in (None, torch.tensor([0, 6], dtype=torch.int32)):
        compiled = torch.compile(causal_conv1d_bwd, fullgraph=True, backend="aot_eager")
        assert compiled(X, W, None, cu) == (None, None, None)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_compile_has_no_graph_break_and_the_eager_bits(packed: bool, states: bool) -> None:
    """fullgraph, forward and backward; one graph for every number of tokens and any offsets."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(x: Tensor, w: Tensor, cu: Tensor | None, state: Tensor | None) -> tuple[Tensor, ...]:
        got = causal_conv1d(x * 1, w, cu, initial_state=state, output_final_state=state is not None)
        return got if isinstance(got, tuple) else (got,)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (12, 19, 33):
        cu = torch.tensor([0, 2, 2, tokens], dtype=torch.int32) if packed else None
        results = []
        for function in (layer, compiled):
            x, w = normal(0, tokens, 16).requires_grad_(), normal(1, 16, 4, dtype=F32).requires_grad_()
            state = normal(2, 3 if packed else 1, 3, 16).requires_grad_() if states else None
            torch._dynamo.mark_dynamic(x, 0)
            outputs = function(x, w, cu, state)
            sum((output.float().square().sum() for output in outputs), torch.zeros(())).backward()
            leaves = [leaf for leaf in (x, w, state) if leaf is not None]
            results.append([*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)])
        for index, (a, b) in enumerate(zip(*results, strict=True)):
            assert a is not None
            assert b is not None
            assert_same_bits(b, a, f"compiled output {index} at {tokens} tokens")
    assert counter.frame_count == 1


def test_a_compiled_backward_uses_the_policy_of_its_forward() -> None:
    x, dy = normal(0, 64, 8), normal(1, 64, 8)
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")

    def gradient(function: Callable[..., Any], before: str, after: str) -> Tensor:
        w = normal(2, 8, 4, dtype=F32).requires_grad_()
        config.configure(cake_conv1d_silu_grad_preactivation=before)
        y = function(x, w)
        config.configure(cake_conv1d_silu_grad_preactivation=after)
        return torch.autograd.grad(y, w, dy)[0]

    for policy, other in (("bf16", "fp32"), ("fp32", "bf16")):
        want = gradient(causal_conv1d, policy, policy)
        assert_same_bits(gradient(compiled, policy, other), want, f"dweight of a forward under {policy}")


def test_the_result_of_a_running_collective_is_differentiable() -> None:
    """A wrapper class: the registered operator waits for it, in the forward and in the backward."""
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    x, w = normal(0, 20, 8), normal(1, 8, 4).requires_grad_()
    pending = collectives.AsyncCollectiveTensor(x)
    assert torch.equal(causal_conv1d(pending, w), causal_conv1d(x, w))
    causal_conv1d(x, w).backward(collectives.AsyncCollectiveTensor(x))
    got, w.grad = w.grad, None
    causal_conv1d(x, w).backward(x)
    assert got is not None
    assert w.grad is not None
    assert torch.equal(got, w.grad)
