"""Tensors without memory, tracers and torch.compile: the registered operators of the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from cake_core.kcp import build_context_kcp, partition_kcp
from cake_core.testing.gates import assert_same_bits
from cake_gdn import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    packed_qkv_views,
)
from cake_gdn.testing import steps
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

F32, BF16 = torch.float32, torch.bfloat16
Operands = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def operands(tokens: int = 70) -> Operands:
    step = steps.make_step((tokens,), (1, 2))
    return step.q, step.k, step.v, step.g, step.beta


def test_meta_tensors_have_shapes_and_types() -> None:
    """Validated, not computed: states, gradients in the dtypes of their operands, no contents of offsets."""
    given = [t.to("meta").requires_grad_() for t in operands(50)]
    state = torch.empty(3, 2, 128, 128, device="meta", requires_grad=True)
    cu = torch.empty(4, device="meta", dtype=torch.int32)
    o, final = chunk_gated_delta_rule(*given, initial_state=state, output_final_state=True, cu_seqlens=cu)
    assert final is not None
    assert (o.shape, o.dtype, o.device.type) == (given[2].shape, BF16, "meta")
    assert (final.shape, final.dtype) == (state.shape, F32)
    (o.float().sum() + final.sum()).backward()
    for leaf in (*given, state):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)
    o, final, _ = chunk_gated_delta_rule_fwd(*(t.detach() for t in given), save="none")
    assert final is None
    with pytest.raises(ValueError, match="initial_state"):
        chunk_gated_delta_rule(*given, initial_state=state[:2], cu_seqlens=cu)
    with pytest.raises(ValueError, match="beta"):
        chunk_gated_delta_rule(*given[:4], given[4][:, :3])


def test_fake_tensors_have_shapes_and_types() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(1, 50, 1, 128, dtype=BF16) for _ in range(2))
        v = torch.empty(1, 50, 2, 128, dtype=BF16)
        g, beta = (torch.empty(1, 50, 2) for _ in range(2))
        o, final = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        grads = chunk_gated_delta_rule_bwd(q, k, v, g, beta, o, needs=(True,) * 5 + (False,))
    assert final is not None
    assert (o.shape, o.dtype, o.device.type) == (v.shape, BF16, "cpu")
    assert (final.shape, final.dtype) == ((1, 2, 128, 128), F32)
    assert grads.dh0 is None
    assert [t.dtype for t in grads if t is not None] == [BF16] * 3 + [F32] * 2


@pytest.mark.usefixtures("cuda_autocast")
def test_autocast_casts_fake_tensors_on_cuda_and_breaks_no_graph() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 50, 1, 128, device="cuda") for _ in range(3))
        g, beta = (torch.empty(1, 50, 1, device="cuda") for _ in range(2))
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
        assert (o.dtype, o.device.type) == (BF16, "cuda")
    given = [t.float() for t in operands(70)]
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    got, want = compiled(*given)[0], chunk_gated_delta_rule(*given)[0]
    assert want.dtype == F32
    assert_same_bits(got, want, "on the CPU")


TRACED: dict[str, Callable[..., Any]] = {
    "forward": lambda *t: chunk_gated_delta_rule_fwd(*t[:5], cu_seqlens=t[5], save="none")[0],
    "no-offsets": lambda *t: chunk_gated_delta_rule_fwd(*t[:5], save="none")[0],
    "final-state": lambda *t: chunk_gated_delta_rule(*t[:5], cu_seqlens=t[5], output_final_state=True),
    "backward": lambda *t: tuple(
        chunk_gated_delta_rule_bwd(*t[:5], t[2] * 2, cu_seqlens=t[5], needs=(True,) * 5 + (False,))
    )[:5],
}


@pytest.mark.parametrize("name", TRACED)
def test_a_tracer_of_fake_tensors_records_the_computation(name: str) -> None:
    """Not an allocation alone, whose content is anything."""
    call = TRACED[name]
    traced = make_fx(call, tracing_mode="fake")(*operands(), torch.tensor([0, 5, 70], dtype=torch.int32))
    other = (*(t.flip(1) for t in operands()), torch.tensor([0, 66, 70], dtype=torch.int32))
    got, want = (value if isinstance(value, tuple) else (value,) for value in (traced(*other), call(*other)))
    for g, expected in zip(got, want, strict=True):
        assert torch.equal(g, expected)


def test_the_operators_keep_their_promises_to_torch() -> None:
    """opcheck: nothing is written or aliased, fake results look like real ones, autograd is registered."""
    from cake_gdn import custom_ops  # noqa: F401  # registers them

    step = steps.make_step((70, 5), (1, 2), dtype="float32", state=True)
    options = (0.1, True, False, "auto", "full", True)
    leaves = tuple(step.leaves().values())
    torch.library.opcheck(torch.ops.cake_gdn.fwd.default, (*leaves, step.cu, None, *options))
    plain = tuple(t.detach() for t in leaves)
    _, _, *tapes = torch.ops.cake_gdn.fwd(*plain, step.cu, None, *options)
    given = (step.do, step.dht, *plain, step.cu, None, *tapes, *options, [True] * 6)
    torch.library.opcheck(torch.ops.cake_gdn.bwd.default, given)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_compile_has_no_graph_break_and_the_eager_bits(states: bool, packed: bool) -> None:
    """fullgraph, forward and backward; one graph for every number of tokens beyond a chunk and any offsets."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(*t: Any) -> tuple[Tensor, ...]:
        q, k, v, g, beta, cu, state = t
        o, final = chunk_gated_delta_rule(
            q * 1, k, v, g, beta, initial_state=state, output_final_state=states, use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu,
        )  # fmt: skip
        return (o,) if final is None else (o, final)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (70, 99, 200):
        cu = torch.tensor([0, 2, 2, tokens], dtype=torch.int32) if packed else None
        results = []
        for function in (layer, compiled):
            leaves = [t.detach().requires_grad_() for t in operands(tokens)]
            for leaf in leaves:
                torch._dynamo.mark_dynamic(leaf, 1)
            state = torch.full((3 if packed else 1, 2, 128, 128), 0.1).requires_grad_() if states else None
            outputs = function(*leaves, cu, state)
            sum((y.float().square().sum() for y in outputs), torch.zeros(())).backward()
            every = leaves if state is None else [*leaves, state]
            results.append([*(y.detach() for y in outputs), *(leaf.grad for leaf in every)])
        for index, (a, b) in enumerate(zip(*results, strict=True)):
            assert_same_bits(b, a, f"compiled output {index} at {tokens} tokens")
    assert counter.frame_count == 1


def test_what_torch_does_in_front_of_the_op_compiles_with_it() -> None:
    step = steps.make_step((40,), (1, 2))

    def layer(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
        return chunk_gated_delta_rule(
            q, k, v, a, b, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True,
            A_log=a_log, dt_bias=bias,
        )[0]  # fmt: skip

    given = (step.q, step.k, step.v, step.g, step.beta, torch.zeros(2), torch.ones(2))
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in given]
        o = function(*leaves)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, step.do)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


GATED: dict[str, tuple[dict[str, Any], str]] = {
    "A_log of one head": ({"A_log": torch.zeros(1)}, "A_log"),
    "A_log of ints": ({"A_log": torch.zeros(2, dtype=torch.int32)}, "A_log"),
    "dt_bias of one head": ({"dt_bias": torch.zeros(1)}, "dt_bias"),
    "dt_bias of tokens": ({"dt_bias": torch.zeros(70, 2)}, "dt_bias"),
    "A_log of no tensor": ({"A_log": 0.5}, "A_log"),
    "g of one head": ({"g": torch.zeros(1, 70, 1)}, "g"),
    "g of one token": ({"g": torch.zeros(1, 1, 2)}, "g"),
    "beta of ints": ({"beta": torch.ones(1, 70, 2, dtype=torch.int32)}, "beta"),
}


@pytest.mark.parametrize("name", GATED)
def test_what_stands_in_front_of_the_op_takes_no_more_in_a_graph(name: str) -> None:
    """torch would broadcast and promote; the op would see the result alone."""
    step = steps.make_step((70,), (1, 2))
    changed, named = GATED[name]
    given: dict[str, Any] = {"g": step.g, "beta": step.beta, "A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}

    def layer(q: Tensor) -> Tensor:
        return chunk_gated_delta_rule(
            q, step.k, step.v, **{**given, **changed}, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True
        )[0]

    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match=rf"chunk_gated_delta_rule: {named} is"):
            function(step.q)


@pytest.mark.parametrize("offsets", [[0, 30.7, 70], [0, 30.0, 70], [False, 30, 70], [False, True]])
def test_offsets_in_a_graph_are_ints(offsets: list[Any]) -> None:
    """A cast would cut them off."""
    step = steps.make_step((70,), (1, 2))

    def layer(q: Tensor) -> Tensor:
        return chunk_gated_delta_rule(q, step.k, step.v, step.g, step.beta, cu_seqlens_cpu=offsets)[0]

    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match=r"chunk_gated_delta_rule: cu_seqlens_cpu"):
            function(step.q)


OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": ({"scale": 0.5}, {}),
    "use_qk_l2norm_in_kernel": ({"use_qk_l2norm_in_kernel": True}, {}),
    "state_v_first": ({}, {"state_v_first": True}),
    "plan": ({"plan": 2}, {}),
}


@pytest.mark.parametrize("field", [*OTHER, "shape"])
def test_a_graph_refuses_the_saved_set_of_another_eager_call(field: str) -> None:
    """All but the offsets: a trace does not know them."""
    step, tokens = steps.make_step((70,), (1, 2)), 20 if field == "shape" else 70
    rows = [t[:, :tokens] for t in (step.q, step.k, step.v, step.g, step.beta)]
    eager, traced = OTHER.get(field, ({}, {}))
    *_, saved = chunk_gated_delta_rule_fwd(*rows, **eager)

    def gradient(q: Tensor, **options: Any) -> Any:
        return chunk_gated_delta_rule_bwd(q, step.k, step.v, step.g, step.beta, step.do, saved=saved, **options)[0]

    with pytest.raises(Exception, match=rf"saved is of a forward with {field} "):
        torch.compile(gradient, fullgraph=True, backend="aot_eager")(step.q, **traced)
    *_, saved = chunk_gated_delta_rule_fwd(step.q, step.k, step.v, step.g, step.beta)
    torch._dynamo.reset()
    got = torch.compile(gradient, fullgraph=True, backend="aot_eager")(step.q)
    assert_same_bits(got, gradient(step.q), "dq")


def test_offsets_of_a_graph_may_be_symbols() -> None:
    step = steps.make_step((70,), (1, 2))

    def layer(q: Tensor, middle: int) -> Tensor:
        return chunk_gated_delta_rule(q, step.k, step.v, step.g, step.beta, cu_seqlens_cpu=[0, middle, 70])[0]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for middle in (30, 31, 64):
        assert torch.equal(compiled(step.q, middle), layer(step.q, middle))


def test_a_packed_row_compiles_with_the_eager_bits() -> None:
    step = steps.make_step((70,), (1, 2))

    def layer(row: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v = packed_qkv_views(row * 1, num_qk_heads=1, num_v_heads=2)
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, plan="serial")[0]

    row = torch.cat([t.flatten(2) for t in (step.q, step.k, step.v)], -1)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (row, step.g, step.beta)]
        o = function(*leaves)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, step.do)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(b, a, "compiled")


@pytest.mark.parametrize("save", ["full", "light", "none"])
def test_the_functional_passes_compile_with_the_eager_bits(save: str) -> None:
    """Transposed states and segments of two chunks, forward and backward in one graph."""
    step = steps.make_step((300, 20), (1, 2), state=True, v_first=True)

    def both(*t: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, state, do, dht, cu = t
        given: dict[str, Any] = {
            "initial_state": state, "use_qk_l2norm_in_kernel": True, "state_v_first": True, "cu_seqlens": cu, "plan": 2
        }  # fmt: skip
        o, final, saved = chunk_gated_delta_rule_fwd(q, k, v, g, beta, output_final_state=True, save=save, **given)
        assert final is not None
        grads = chunk_gated_delta_rule_bwd(q, k, v, g, beta, do, dht, saved=saved, **given)
        return (o, final, *(grad for grad in grads if grad is not None))

    given = [getattr(step, name) for name in (*steps.OPERANDS, "do", "dht", "cu")]
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(*given)
    for index, (a, b) in enumerate(zip(both(*given), got, strict=True)):
        assert_same_bits(b, a, f"compiled output {index}")


def test_a_context_parallel_call_breaks_the_graph_and_keeps_the_bits() -> None:
    context = build_context_kcp(partition_kcp((0, 30, 70), 1, "zigzag"), None, 0, "cpu")

    def layer(*t: Tensor) -> Tensor:
        return chunk_gated_delta_rule(t[0] * 2, *t[1:], use_qk_l2norm_in_kernel=True, cp_context=context)[0] * 2

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in operands()]
        o = function(*leaves)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))])
    for a, b in zip(*results, strict=True):
        assert_same_bits(b, a, "compiled")
