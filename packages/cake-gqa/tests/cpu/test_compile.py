"""Tensors without memory, tracers and torch.compile: the registered operators of the op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.exc
import torch._dynamo.testing
from cake_core import config
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.operands import normal
from cake_core.testing.traced import assert_refused_in_graphs, compiled_operations
from cake_gqa import varlen_gqa_attention, varlen_gqa_attention_bwd, varlen_gqa_attention_fwd
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _one_thread_and_a_fresh_dynamo() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    config.configure()
    yield
    config.configure()
    torch.set_num_threads(threads)


def operands(tokens: int = 70, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """q, k, v and equal offsets of two documents, the first of 5 tokens."""
    rows = [normal(seed, tokens, 2 if seed == 0 else 1, 256, dtype=dtype) for seed in range(3)]
    return *rows, torch.tensor([0, 5, tokens], dtype=torch.int32)


def calls(*functions: Any) -> tuple[Any, ...]:
    """Functions to call with a list of operands."""
    return functions


def test_meta_tensors_have_shapes_and_types() -> None:
    """Validated, not computed: no contents of offsets, no bound."""
    q, k, v, cu = (t.to("meta") for t in operands(50))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = varlen_gqa_attention(q, k, v, cu, cu, max_seqlen_k=1, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, BF16, "meta")
    assert (lse.shape, lse.dtype, lse.requires_grad) == ((2, 50), F32, False)
    out.float().sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype, leaf.grad.is_meta) == (leaf.shape, BF16, True)
    rows = q.detach(), k.detach(), v.detach()
    windows = varlen_gqa_attention_bwd(
        *rows, out.detach(), lse, rows[0], cu, cu, max_seqlen_k=1, dkv_dtype=F32, needs=(False, True)
    )
    assert windows[0] is None
    assert windows[1] is not None
    assert (windows[1].shape, windows[1].dtype, windows[1].is_meta) == (k.shape, F32, True)
    with pytest.raises(ValueError, match="v is of shape"):
        varlen_gqa_attention(q, k, v[:3], cu, cu, max_seqlen_k=1)
    with pytest.raises(ValueError, match=r"cu_seqlens_q is torch\.int64"):
        varlen_gqa_attention(q, k, v, cu.long(), cu, max_seqlen_k=1)


def test_fake_tensors_have_shapes_and_types() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(50, heads, 256, dtype=BF16) for heads in (2, 1, 1))
        cu = torch.empty(3, dtype=torch.int32)
        out, lse = varlen_gqa_attention(q, k, v, cu, cu, max_seqlen_k=50, return_lse=True)
        dq, dk, dv = varlen_gqa_attention_bwd(q, k, v, out, lse, out, cu, cu, max_seqlen_k=50, dkv_dtype=F32)
        only = varlen_gqa_attention_bwd(q, k, v, out, lse, out, cu, cu, max_seqlen_k=50, needs=(True, False))
    assert (out.shape, out.dtype, out.device.type) == (q.shape, BF16, "cpu")
    assert (lse.shape, lse.dtype) == ((2, 50), F32)
    assert dq is not None
    assert dk is not None
    assert dv is not None
    assert [t.dtype for t in (dq, dk, dv)] == [BF16, F32, F32]
    assert only[0] is not None
    assert only[1:] == (None, None)


def offsets_of(tokens: int) -> Tensor:
    return torch.tensor([0, tokens - 4, tokens], dtype=torch.int32)


TRACED: dict[str, Callable[..., Any]] = {
    "differentiable": lambda q, k, v, cu: varlen_gqa_attention(q, k, v, cu, cu, max_seqlen_k=70),
    "forward": lambda q, k, v, cu: varlen_gqa_attention_fwd(q, k, v, cu, cu),
    "backward": lambda q, k, v, cu: varlen_gqa_attention_bwd(
        q, k, v, q, q[..., 0].T.float().contiguous(), q * 2, cu, cu, max_seqlen_k=70
    ),
    "a-half": lambda q, k, v, cu: varlen_gqa_attention_bwd(
        q, k, v, q, q[..., 0].T.float().contiguous(), q * 2, cu, cu, max_seqlen_k=70, needs=(False, True)
    )[1:],
}


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("mode", ["fake", "real"])
def test_a_tracer_records_the_computation(name: str, mode: Any) -> None:
    """Not an allocation alone, whose content is anything."""
    call = TRACED[name]
    traced = make_fx(call, tracing_mode=mode)(*operands())
    other = (*(t.flip(0) for t in operands()[:3]), offsets_of(70))
    got, want = (value if isinstance(value, tuple) else (value,) for value in (traced(*other), call(*other)))
    for g, expected in zip(got, want, strict=True):
        assert torch.equal(g, expected)


def test_the_operators_keep_their_promises_to_torch() -> None:
    """opcheck: nothing is written or aliased, fake results look like real ones, autograd is registered."""
    from cake_gqa import custom_ops  # noqa: F401  # registers them

    *rows, cu = operands(20, F32)
    leaves = [t.requires_grad_() for t in rows]
    options = 20, 0.1, "det", False
    torch.library.opcheck(torch.ops.cake_gqa.fwd.default, (*leaves, cu, cu, *options))
    plain = [t.detach() for t in leaves]
    out, lse = torch.ops.cake_gqa.fwd(*plain, cu, cu, *options)
    given = normal(3, 20, 2, 256, dtype=F32), *plain, out, lse, cu, cu, *options, F32, True, True
    torch.library.opcheck(torch.ops.cake_gqa.bwd.default, given)


@pytest.mark.parametrize("trained", ["qkv", "q", "kv", "v"])
def test_compile_has_no_graph_break_and_the_eager_bits(trained: str) -> None:
    """fullgraph, forward and backward; one graph for every number of tokens and any offsets."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
        return varlen_gqa_attention(q * 1, k, v, cu, cu, max_seqlen_k=200, return_lse=True)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (70, 99, 200):
        results = []
        for function in calls(layer, compiled):
            *rows, cu = operands(tokens)
            for name, row in zip("qkv", rows, strict=True):
                torch._dynamo.mark_dynamic(row, 0)
                row.requires_grad_(name in trained)
            out, lse = function(*rows, cu)
            out.sum().backward()
            results.append([out.detach(), lse, *(row.grad for row in rows if row.requires_grad)])
        for index, (a, b) in enumerate(zip(*results, strict=True)):
            assert_same_bits(b, a, f"compiled output {index} at {tokens} tokens")
    assert counter.frame_count == 1


def test_expanded_keys_compile_with_the_eager_gradients() -> None:
    def layer(q: Tensor, k: Tensor, cu: Tensor) -> Tensor:
        wide = k.expand(-1, 2, -1)
        return varlen_gqa_attention(q, wide, wide, cu, cu, max_seqlen_k=70)

    q, k, _, cu = operands()
    results = []
    for function in calls(layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        out = function(*leaves, cu)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, normal(3, 70, 2, 256))])
    for a, b in zip(*results, strict=True):
        assert_same_bits(b, a, "compiled")


def test_the_functional_passes_compile_with_the_eager_bits() -> None:
    """Forward and backward in one graph, dK and dV in FP32."""

    def both(*given: Tensor) -> tuple[Tensor, ...]:
        q, k, v, dout, cu = given
        out, lse = varlen_gqa_attention_fwd(q, k, v, cu, cu, softmax_scale=0.1)
        grads = varlen_gqa_attention_bwd(
            q, k, v, out, lse, dout, cu, cu, max_seqlen_k=70, softmax_scale=0.1, dkv_dtype=F32
        )
        return out, lse, *(grad for grad in grads if grad is not None)

    *rows, cu = operands()
    given = *rows, normal(3, 70, 2, 256), cu
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(*given)
    for index, (a, b) in enumerate(zip(both(*given), got, strict=True)):
        assert_same_bits(b, a, f"compiled output {index}")


def test_a_source_of_destinations_breaks_the_graph_and_keeps_the_bits() -> None:
    *rows, cu = operands()
    windows = torch.empty(2, 70, 1, 256)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_gqa_attention(q * 1, k, v, cu, cu, max_seqlen_k=70, dkv_acc=lambda: (windows[0], windows[1])) * 2

    results = []
    for function in calls(layer, torch.compile(layer, backend="aot_eager")):
        windows.fill_(torch.nan)
        leaves = [t.clone().requires_grad_() for t in rows]
        out = function(*leaves)
        out.backward(normal(3, 70, 2, 256))
        assert leaves[1].grad is None
        results.append([out.detach(), leaves[0].grad, windows.clone()])
    for a, b in zip(*results, strict=True):
        assert_same_bits(b, a, "compiled")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="varlen_gqa_attention: a graph cannot hold dkv_acc"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(*rows)


def test_a_backward_inside_of_a_compiled_function_is_run_as_it_is_written() -> None:
    """What torch.compile traced of it had other bits."""
    q, k, v, cu = operands()
    dout, ends = normal(3, 70, 2, 256), list[tuple[Tensor, ...]]()

    def train() -> None:
        leaf, window = q.clone().requires_grad_(), (torch.zeros(70, 1, 256), torch.zeros(70, 1, 256))
        out = varlen_gqa_attention(leaf, k, v, cu, cu, max_seqlen_k=70, dkv_acc=lambda: window)
        out.backward(dout)
        assert leaf.grad is not None
        ends.append((out.detach(), leaf.grad, *window))

    train()
    operations = compiled_operations(train)
    for name, one, other in zip(("out", "dq", "dk", "dv"), *ends, strict=True):
        assert_same_bits(one, other, name)
    arithmetic = {"bmm", "baddbmm", "matmul", "mul", "mul_", "sub", "exp", "add_", "to", "sum"}
    assert not operations & arithmetic, operations


def test_a_tracer_refuses_a_source_of_destinations() -> None:
    """A recorded graph would lack what is written to them."""
    *rows, cu = operands()
    call = lambda q: varlen_gqa_attention(  # noqa: E731
        q, rows[1], rows[2], cu, cu, max_seqlen_k=70, dkv_acc=lambda: (rows[1], rows[2])
    )
    for mode in ("fake", "real"):
        with pytest.raises(ValueError, match=r": dkv_acc is given to a call that is traced"):
            make_fx(call, tracing_mode=mode)(rows[0])


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dk_acc"])
def test_outputs_that_are_given_are_refused_in_graphs(name: str) -> None:
    q, k, v, cu = operands()
    row_map = torch.arange(70, dtype=torch.int32)
    # Gradients so small that none is the 7.0 that says untouched, or large enough that adding them changes it.
    lse = torch.full((2, 70), 1.0 if name == "dk_acc" else 50.0)

    def call(given: Tensor) -> object:
        if name in ("out", "lse"):
            return varlen_gqa_attention_fwd(q, k, v, cu, cu, **{name: given})  # type: ignore[arg-type]
        rest: dict[str, Any] = {"dv_acc": torch.zeros(70, 1, 256), "row_map": row_map} if name == "dk_acc" else {}
        return varlen_gqa_attention_bwd(q, k, v, q, lse, q, cu, cu, max_seqlen_k=70, **{name: given}, **rest)

    like = {"out": q, "lse": torch.empty(2, 70), "dq": q, "dk": k, "dk_acc": k.float()}[name]
    assert_refused_in_graphs(call, name, torch.full_like(like, 7.0))


def test_wrong_operands_of_a_compiled_call_are_named() -> None:
    q, k, v, cu = operands()
    compiled = torch.compile(
        lambda q, k, v: varlen_gqa_attention(q, k, v, cu, cu, max_seqlen_k=4), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(
        ValueError, match="varlen_gqa_attention: max_seqlen_k is 4; needs at least 65, the keys of segment 1"
    ):
        compiled(q, k, v)
    with pytest.raises(Exception, match=r"v is of shape \(s?\d+, 1, 256\); needs the shape of k"):
        compiled(q, k, v[:3])


def test_the_option_is_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """check_seqlens is read when a graph is made, and a new configuration makes a new graph."""
    from cake_gqa import _calls

    seen: list[bool] = []
    real = _calls.check_contents

    def spy(*args: Any) -> Any:
        seen.append(args[7])
        return real(*args)

    monkeypatch.setattr(_calls, "check_contents", spy)
    *rows, cu = operands()
    compiled = torch.compile(
        lambda q, k, v: varlen_gqa_attention(q, k, v, cu, cu, max_seqlen_k=70), fullgraph=True, backend="aot_eager"
    )
    for check in (False, True, False):
        config.configure(cake_gqa_check_seqlens=check)
        compiled(*rows)
        assert seen[-1] is check


@pytest.mark.slow
def test_inductor_gives_the_eager_bits() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return varlen_gqa_attention(q, k, v, cu, cu, max_seqlen_k=70)

    results = []
    for function in calls(layer, torch.compile(layer, fullgraph=True)):
        *rows, cu = operands()
        leaves = [t.clone().requires_grad_() for t in rows]
        out = function(*leaves, cu)
        out.backward(normal(3, 70, 2, 256))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(b, a, "compiled")
