"""The registered operators and intercepted calls beside autograd: gradients that nobody asks for, dtypes, wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cake_core.testing.gates import assert_same_bits
from cake_gqa import backends, custom_ops, varlen_gqa_attention, varlen_gqa_attention_bwd
from cake_gqa.testing import steps
from torch import Tensor

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def operands(dtype: torch.dtype = F32) -> dict[str, Any]:
    return steps.make_step(((3, 5), (4, 2)), (4, 2), dtype=str(dtype).removeprefix("torch.")).passed()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


@pytest.mark.parametrize("compiled", [False, True])
def test_an_output_without_a_gradient_asks_for_no_destination(compiled: bool) -> None:
    """A backward behind it that gives none: no zeros are made, nothing is launched."""
    given, calls = operands(), list[int]()
    leaf = given["q"].requires_grad_()

    def source() -> tuple[Tensor, Tensor]:
        calls.append(1)
        return torch.empty(7, 2, 256), torch.empty(7, 2, 256)

    rest = given["k"], given["v"], given["cu_seqlens_q"], given["cu_seqlens_k"]
    if compiled:
        out, _ = custom_ops.forward(leaf, *rest, 5, 1 / 16, "det", False)
    else:
        out = varlen_gqa_attention(leaf, *rest, max_seqlen_k=5, dkv_acc=source)
    NoGradient.apply(out).sum().backward()
    assert leaf.grad is None
    assert not calls


def test_kernels_get_the_result_of_a_collective_not_its_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    seen: list[type] = []
    monkeypatch.setattr(backends.cpu, "backward", lambda x, out, lse, dout, dq, keys: seen.append(type(dout)))
    given = operands()
    out = varlen_gqa_attention(
        given["q"].requires_grad_(), *(given[n] for n in ("k", "v", "cu_seqlens_q", "cu_seqlens_k")), max_seqlen_k=5
    )
    out.backward(collectives.AsyncCollectiveTensor(given["dout"]))
    assert seen == [Tensor]


def test_lse_of_the_operator_has_no_gradient() -> None:
    given = operands()
    rest = [given[name] for name in ("k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    out, lse = custom_ops.forward(given["q"].requires_grad_(), *rest, 5, 1 / 16, "det", False)
    assert out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_gradients_of_the_operator_have_the_bits_of_autograd(dtype: torch.dtype) -> None:
    given = operands(dtype)
    offsets = given["cu_seqlens_q"], given["cu_seqlens_k"]
    results = []
    for through in (True, False):
        leaves = [given[name].clone().requires_grad_() for name in "qkv"]
        if through:
            out = custom_ops.forward(*leaves, *offsets, 5, 1 / 16, "det", False)[0]
        else:
            out = varlen_gqa_attention(leaves[0], leaves[1], leaves[2], *offsets, max_seqlen_k=5)
        results.append(torch.autograd.grad(out, leaves, given["dout"]))
    for a, b in zip(*results, strict=True):
        assert a.dtype == dtype
        assert_same_bits(a, b, "operator")


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_halves_of_an_intercepted_backward_that_nobody_needs_are_none(needs: tuple[bool, bool]) -> None:
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    given = operands()
    given["k"] = collectives.AsyncCollectiveTensor(given["k"])
    found = varlen_gqa_attention_bwd(**given, max_seqlen_k=5, needs=needs, dkv_dtype=F32)
    assert [grad is not None for grad in found] == [needs[0], needs[1], needs[1]]
