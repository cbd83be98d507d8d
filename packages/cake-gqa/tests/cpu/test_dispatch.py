"""What reaches a backend, on fake CUDA devices: operands in place, results allocated, devices, streams, host reads.

A recorder stands in for the module of the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core import config, device
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.operands import normal
from cake_gqa import backends, varlen_gqa_attention, varlen_gqa_attention_bwd, varlen_gqa_attention_fwd
from cake_gqa.backends.operands import KeyGradients, Operands
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32


class Recorder:
    """A backend module that notes its calls and fills what it is given."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def forward(self, x: Operands, out: Tensor, lse: Tensor) -> None:
        self._note("forward", x, out=out, lse=lse)
        out.fill_(1.0)
        lse.fill_(2.0)

    def backward(
        self, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dq: Tensor | None, keys: KeyGradients | None
    ) -> None:
        self._note("backward", x, out=out, lse=lse, dout=dout, dq=dq, keys=keys)
        for given in (dq, *((keys.dk, keys.dv) if keys is not None else ())):
            if given is not None:
                given.fill_(3.0)

    def _note(self, what: str, x: Operands, **given: Any) -> None:
        self.calls.append(SimpleNamespace(what=what, x=x, stream=device.stream(x.device_index), **given))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setitem(backends.CUDA, "sm_90a", found)
    return found


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def operands(fake: FakeCuda, index: int = 0, lens: tuple[tuple[int, int], ...] = ((3, 5), (4, 2))) -> list[Tensor]:
    """q, k, v, cu_seqlens_q, cu_seqlens_k, four query heads over two key heads."""
    cu = [[0, *torch.tensor(column).cumsum(0).tolist()] for column in zip(*lens, strict=True)]
    rows = [normal(seed, cu[seed > 0][-1], 4 if seed == 0 else 2, 256) for seed in range(3)]
    return [fake.cuda(t, index) for t in (*rows, *(torch.tensor(values, dtype=torch.int32) for values in cu))]


def step(fake: FakeCuda, index: int = 0, **given: Any) -> list[Tensor]:
    """Forward and backward through autograd; the leaves."""
    q, k, v, cu_q, cu_k = operands(fake, index)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out: Any = varlen_gqa_attention(q, k, v, cu_q, cu_k, max_seqlen_k=5, **given)
    out.backward(fake.cuda(normal(3, 7, 4, 256), index))
    return leaves


def test_a_step_is_one_call_a_pass(recorder: Recorder) -> None:
    with FakeCuda() as fake:
        q, k, v = step(fake, softmax_scale=0.5)
        forward, backward = recorder.calls
        assert (forward.what, backward.what) == ("forward", "backward")
        for call in recorder.calls:
            x = call.x
            assert (x.device_index, x.scale, x.variant, x.segments.max_seqlen_k) == (0, 0.5, "det", 5)
            assert x.segments.host is None, "the host has not read the offsets"
            assert (x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr()) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
        assert (forward.out.shape, forward.out.dtype, forward.out.is_contiguous()) == ((7, 4, 256), BF16, True)
        assert (forward.lse.shape, forward.lse.dtype, forward.lse.is_contiguous()) == ((4, 7), F32, True)
        assert (backward.out.data_ptr(), backward.lse.data_ptr()) == (forward.out.data_ptr(), forward.lse.data_ptr())
        assert backward.keys.row_map is None
        for grad, leaf in zip((backward.dq, backward.keys.dk, backward.keys.dv), (q, k, v), strict=True):
            assert (grad.shape, grad.dtype, grad.is_contiguous()) == (leaf.shape, BF16, True)
            assert leaf.grad is not None
            assert (leaf.grad == 3.0).all()


def test_a_step_makes_its_results_and_nothing_else(recorder: Recorder) -> None:
    """out and lse; dq, dk and dv. No view, no copy, no fill."""
    with FakeCuda() as fake:
        q, k, v, cu_q, cu_k = operands(fake)
        dout = fake.cuda(normal(3, 7, 4, 256))
        before = len(fake.allocations)
        out = varlen_gqa_attention(
            q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), cu_q, cu_k, max_seqlen_k=5
        )
        torch.autograd.grad(out, (q, k, v), dout)
        made = [(allocation.by, allocation.nbytes) for allocation in fake.allocations[before:]]
        assert made == [("runtime", nbytes) for nbytes in (7 * 4 * 512, 4 * 7 * 4, *[7 * 2 * 512] * 2, 7 * 4 * 512)]


@pytest.mark.parametrize("dtype", [torch.float16, F32, torch.float64])
def test_cuda_serves_bf16_alone(recorder: Recorder, dtype: torch.dtype) -> None:
    """Also under autocast, which casts nothing."""
    with FakeCuda() as fake:
        q, k, v, cu_q, cu_k = operands(fake)
        wide = [t.to(dtype) for t in (q, k, v)]
        with pytest.raises(ValueError, match=rf"varlen_gqa_attention: q is {dtype}; needs torch.bfloat16 on CUDA"):
            varlen_gqa_attention(wide[0], wide[1], wide[2], cu_q, cu_k, max_seqlen_k=5)
        torch.set_autocast_enabled("cuda", True)
        try:
            with pytest.raises(ValueError, match=rf": q is {dtype}; needs torch.bfloat16 on CUDA"):
                varlen_gqa_attention(wide[0], k, v, cu_q, cu_k, max_seqlen_k=5)
        finally:
            torch.set_autocast_enabled("cuda", False)
        out, lse = varlen_gqa_attention_fwd(q, k, v, cu_q, cu_k)
        with pytest.raises(ValueError, match=r": dkv_dtype is torch.float64; needs torch.bfloat16 or torch.float32"):
            varlen_gqa_attention_bwd(
                q, k, v, out, lse, q, cu_q, cu_k, max_seqlen_k=5, dkv_dtype=torch.float64, needs=(False, True)
            )
        assert len(recorder.calls) == 1


def test_everything_happens_on_the_operands_device_and_stream(recorder: Recorder) -> None:
    """Device 1's operands with device 0 current: nothing is allocated on 0, device 1's stream is used."""
    with FakeCuda(devices=2) as fake, fake.on_stream(1, 0x77):
        before = len(fake.allocations)
        step(fake, 1)
        assert {allocation.index for allocation in fake.allocations[before:]} == {1}
        assert fake.current == 0
        assert {(call.x.device_index, call.stream) for call in recorder.calls} == {(1, 0x77)}


def test_views_of_a_fused_projection_are_read_in_place(recorder: Recorder) -> None:
    with FakeCuda() as fake:
        wide = fake.cuda(normal(0, 7, 9, 256))
        q, k, v = wide[:, :4], wide[:, 4:6], wide[:, 7:]
        _, _, _, cu_q, cu_k = operands(fake)
        varlen_gqa_attention_fwd(q, k, v, cu_q, cu_k)
        varlen_gqa_attention(q, k, v, cu_q, cu_k, max_seqlen_k=5)
        heads_first = fake.cuda(normal(0, 4, 7, 256)).transpose(0, 1)
        varlen_gqa_attention_fwd(heads_first, k, v, cu_q, cu_k)
        first, second, third = (call.x for call in recorder.calls)
        assert [t.data_ptr() for t in (*first[1:4], *second[1:4])] == [t.data_ptr() for t in (q, k, v)] * 2
        assert first.q.stride() == (9 * 256, 256, 1)
        assert (third.q.data_ptr(), third.q.stride()) == (heads_first.data_ptr(), (256, 7 * 256, 1))


def test_expanded_operands_are_copied_for_autograd(recorder: Recorder) -> None:
    """Their gradients flow back through the expansion."""
    with FakeCuda() as fake:
        q, _, v, cu_q, cu_k = operands(fake)
        k = fake.cuda(normal(1, 7, 1, 256)).requires_grad_()
        out = varlen_gqa_attention(q, k.expand(7, 2, 256), v, cu_q, cu_k, max_seqlen_k=5)
        out.backward(torch.zeros_like(out))
        assert recorder.calls[0].x.k.stride() == (512, 256, 1)
        assert k.grad is not None
        assert (k.grad == 6.0).all(), "the two heads added"


@pytest.mark.parametrize("how", ["sum", "transposed", "narrow", "shifted"])
def test_gradients_that_no_kernel_reads_are_copied(recorder: Recorder, how: str) -> None:
    with FakeCuda() as fake:
        q, k, v, cu_q, cu_k = operands(fake)
        out = varlen_gqa_attention(q.requires_grad_(), k, v, cu_q, cu_k, max_seqlen_k=5)
        if how == "sum":
            out.sum().backward()
        else:
            made = {
                "transposed": lambda: fake.cuda(normal(3, 7, 256, 4)).mT,
                "narrow": lambda: fake.cuda(normal(3, 7, 4 * 256 + 4))[:, : 4 * 256].view(7, 4, 256),
                "shifted": lambda: fake.cuda(normal(3, 7 * 4 * 256 + 1))[1:].view(7, 4, 256),
            }
            out.backward(made[how]())
        dout = recorder.calls[1].dout
        assert dout.is_contiguous()
        assert dout.data_ptr() % 16 == 0
        assert device.device_of(dout) == ("cuda", 0)


def test_a_gradient_that_a_kernel_reads_is_not_copied(recorder: Recorder) -> None:
    with FakeCuda() as fake:
        q, k, v, cu_q, cu_k = operands(fake)
        out = varlen_gqa_attention_fwd(q, k, v, cu_q, cu_k)
        dout = fake.cuda(normal(3, 4, 7, 256)).transpose(0, 1)
        varlen_gqa_attention_bwd(q, k, v, *out, dout, cu_q, cu_k, max_seqlen_k=5)
        assert recorder.calls[1].dout.data_ptr() == dout.data_ptr()


# --- halves and forms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_a_half_that_nobody_needs_is_not_computed(recorder: Recorder, needs: tuple[bool, bool]) -> None:
    with FakeCuda() as fake:
        q, k, v, cu_q, cu_k = operands(fake)
        out, lse = varlen_gqa_attention_fwd(q, k, v, cu_q, cu_k)
        before = len(fake.allocations)
        dq, dk, dv = varlen_gqa_attention_bwd(q, k, v, out, lse, q, cu_q, cu_k, max_seqlen_k=5, needs=needs)
        assert [grad is not None for grad in (dq, dk, dv)] == [needs[0], needs[1], needs[1]]
        assert len(fake.allocations) - before == needs[0] + 2 * needs[1]
        if not any(needs):
            assert len(recorder.calls) == 1, "no launch"
            return
        call = recorder.calls[1]
        assert (call.dq is not None, call.keys is not None) == needs


@pytest.mark.parametrize("trained", ["q", "k", "v", "qk", ""])
def test_autograd_computes_what_requires_a_gradient(recorder: Recorder, trained: str) -> None:
    with FakeCuda() as fake:
        q, k, v, cu_q, cu_k = operands(fake)
        named = {"q": q, "k": k, "v": v}
        for name in trained:
            named[name].requires_grad_()
        out = varlen_gqa_attention(q, k, v, cu_q, cu_k, max_seqlen_k=5)
        assert out.requires_grad == bool(trained)
        if not trained:
            return
        out.backward(torch.ones_like(out))
        call = recorder.calls[1]
        assert (call.dq is not None, call.keys is not None) == ("q" in trained, "k" in trained or "v" in trained)
        assert [name for name, t in named.items() if t.grad is not None] == list(trained)


def test_the_three_forms(recorder: Recorder) -> None:
    """What is given is what the backend writes to, and what comes back."""
    with FakeCuda() as fake:
        q, k, v, cu_q, cu_k = operands(fake)
        rows = q, k, v, *varlen_gqa_attention_fwd(q, k, v, cu_q, cu_k), q.clone(), cu_q, cu_k
        bf16 = fake.cuda(torch.empty(7, 4, 256, dtype=BF16)), torch.empty_like(k), torch.empty_like(v)
        found = varlen_gqa_attention_bwd(*rows, max_seqlen_k=5, dq=bf16[0], dk=bf16[1], dv=bf16[2])
        assert all(a is b for a, b in zip(found, bf16, strict=True))
        _, dk, dv = varlen_gqa_attention_bwd(*rows, max_seqlen_k=5, dkv_dtype=F32)
        assert dk is not None
        assert dv is not None
        assert (dk.shape, dk.dtype, dv.shape, dv.dtype) == (k.shape, F32, v.shape, F32)
        dk_acc, dv_acc = (fake.cuda(torch.zeros(9, 2, 256)) for _ in range(2))
        row_map = fake.cuda(torch.arange(7, dtype=torch.int32))
        found = varlen_gqa_attention_bwd(*rows, max_seqlen_k=5, dk_acc=dk_acc, dv_acc=dv_acc, row_map=row_map)
        assert found[1] is dk_acc
        assert found[2] is dv_acc
        first, second, third = (call.keys for call in recorder.calls[1:])
        assert (first.dk is bf16[1], first.row_map) == (True, None)
        assert (second.dk is dk, second.row_map) == (True, None)
        assert (third.dk is dk_acc, third.dv is dv_acc, third.row_map is row_map) == (True, True, True)


def test_a_source_is_asked_once_and_by_the_backward(recorder: Recorder) -> None:
    with FakeCuda() as fake:
        asked: list[int] = []
        windows = [fake.cuda(torch.empty(7, 2, 256)) for _ in range(2)]

        def source() -> tuple[Tensor, Tensor]:
            asked.append(len(recorder.calls))
            return windows[0], windows[1]

        q, k, v = step(fake, dkv_acc=source)
        assert asked == [1], "after the forward, before the backward's launch"
        assert (q.grad is not None, k.grad, v.grad) == (True, None, None)
        assert recorder.calls[1].keys.dk is windows[0]
        keys_alone = operands(fake)
        keys_alone[1].requires_grad_()
        out: Any = varlen_gqa_attention(*keys_alone, max_seqlen_k=5, dkv_acc=source)  # type: ignore[call-overload]
        out.backward(torch.ones_like(out))
        assert recorder.calls[-1].dq is None
        assert len(asked) == 2
        assert keys_alone[1].grad is None


# --- calls without rows -----------------------------------------------------------------------------------------


def test_without_queries_or_keys_nothing_is_launched(recorder: Recorder) -> None:
    """Results are what the formulas give: zeros, -inf, and destinations that keep their bits."""
    with FakeCuda() as fake:
        for lens in (((0, 5), (0, 2)), ((3, 0), (4, 0)), ((0, 0),)):
            q, k, v, cu_q, cu_k = operands(fake, lens=lens)
            out, lse = varlen_gqa_attention_fwd(q, k, v, cu_q, cu_k)
            assert not out.any()
            assert (lse == -torch.inf).all()
            rows = q, k, v, out, lse, q.clone(), cu_q, cu_k
            given = [torch.full_like(t, 7.0) for t in (q, k, v)]
            found = varlen_gqa_attention_bwd(*rows, max_seqlen_k=5, dq=given[0], dk=given[1], dv=given[2])
            assert not any(t.any() for t in found if t is not None)
            dk_acc, dv_acc = (fake.cuda(torch.full((9, 2, 256), -0.0)) for _ in range(2))
            row_map = fake.cuda(torch.zeros(k.shape[0], dtype=torch.int32))
            varlen_gqa_attention_bwd(*rows, max_seqlen_k=5, dk_acc=dk_acc, dv_acc=dv_acc, row_map=row_map)
            assert all(t.signbit().all() for t in (dk_acc, dv_acc)), "-0.0 stays"
        assert not recorder.calls


# --- host reads and captures ------------------------------------------------------------------------------------


def test_the_host_reads_nothing(recorder: Recorder) -> None:
    """In either form, and whatever the offsets and the bound are: the kernels are told."""
    with FakeCuda() as fake, device.synchronize_forbidden():
        step(fake)
        rows = [fake.cuda(torch.empty(9, 2, 256)) for _ in range(2)]
        row_map = fake.cuda(torch.arange(7, dtype=torch.int32))
        step(fake, dkv_acc=lambda: (*rows, row_map))
        q, k, v, cu_q, _ = operands(fake)
        broken = fake.cuda(torch.tensor([3, 2, 9], dtype=torch.int32))
        varlen_gqa_attention(q, k, v, cu_q, broken, max_seqlen_k=0)
    assert len(recorder.calls) == 5


def test_the_check_refuses_before_any_launch(recorder: Recorder) -> None:
    """By option and by argument, which outranks the option."""
    with FakeCuda() as fake:
        q, k, v, cu_q, cu_k = operands(fake)
        broken = fake.cuda(torch.tensor([0, 6, 7], dtype=torch.int32))
        for bound, offsets, text in (
            (4, cu_k, r"max_seqlen_k is 4; needs at least 5, the keys of segment 0"),
            (5, broken, r"max_seqlen_k is 5; needs at least 6, the keys of segment 0"),
            (9, fake.cuda(torch.tensor([0, 8, 7], dtype=torch.int32)), r"cu_seqlens_k\[2\] is 7; needs at least 8"),
        ):
            config.configure()
            with pytest.raises(ValueError, match=text):
                varlen_gqa_attention(q, k, v, cu_q, offsets, max_seqlen_k=bound, check_seqlens=True)
            config.configure(cake_gqa_check_seqlens=True)
            with pytest.raises(ValueError, match=text):
                varlen_gqa_attention(q, k, v, cu_q, offsets, max_seqlen_k=bound)
            assert not recorder.calls
            varlen_gqa_attention(q, k, v, cu_q, offsets, max_seqlen_k=bound, check_seqlens=False)
            recorder.calls.clear()


def test_the_check_reads_once(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both offsets and the row map in one copy."""
    copies: list[int] = []
    real = Tensor.cpu

    def cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copies.append(self.numel())
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    with FakeCuda() as fake:
        q, k, v, cu_q, cu_k = operands(fake)
        rows = [fake.cuda(torch.zeros(9, 2, 256)) for _ in range(2)]
        row_map = fake.cuda(torch.arange(2, 9, dtype=torch.int32))
        out, lse = varlen_gqa_attention_fwd(q, k, v, cu_q, cu_k, check_seqlens=True)
        assert copies == [6]
        given = {"dk_acc": rows[0], "dv_acc": rows[1], "max_seqlen_k": 5, "check_seqlens": True}
        backward = q, k, v, out, lse, q.clone(), cu_q, cu_k
        varlen_gqa_attention_bwd(*backward, row_map=row_map, **given)
        assert copies == [6, 13]
        for broken, text in ((row_map + 1, r"row_map\[6\] is 9; .*below 9"), (row_map - 3, r"row_map\[0\] is -1;")):
            with pytest.raises(ValueError, match=text):
                varlen_gqa_attention_bwd(*backward, row_map=broken, **given)
        with pytest.raises(ValueError, match=r"row_map of dkv_acc\(\)\[6\] is 9;"):
            step(fake, dkv_acc=lambda: (*rows, row_map + 1), check_seqlens=True)


def test_a_capture_takes_calls_and_refuses_the_check(recorder: Recorder) -> None:
    with FakeCuda() as fake, fake.capture(0):
        step(fake)
        assert len(recorder.calls) == 2
        q, k, v, cu_q, cu_k = operands(fake)
        text = r"check_seqlens is True while a CUDA graph is captured, and it synchronizes.*disable the check"
        with pytest.raises(RuntimeError, match=text):
            varlen_gqa_attention(q, k, v, cu_q, cu_k, max_seqlen_k=5, check_seqlens=True)
        config.configure(cake_gqa_check_seqlens=True)
        with pytest.raises(RuntimeError, match=text):
            varlen_gqa_attention_fwd(q, k, v, cu_q, cu_k)
        assert len(recorder.calls) == 2


# --- what is kept -----------------------------------------------------------------------------------------------


def test_autograd_keeps_seven_tensors(recorder: Recorder) -> None:
    """q, k, v, out, lse and the offsets; nothing else hangs on the node, and no destination."""
    with FakeCuda() as fake:
        saved: list[Tensor] = []
        q, k, v, cu_q, cu_k = operands(fake)
        windows = [fake.cuda(torch.empty(7, 2, 256)) for _ in range(2)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out: Any = varlen_gqa_attention(
                q.requires_grad_(), k, v, cu_q, cu_k, max_seqlen_k=5, dkv_acc=lambda: (windows[0], windows[1])
            )
        forward = recorder.calls[0]
        wanted = q, k, v, forward.out, forward.lse, cu_q, cu_k
        assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in wanted)
        held = [value for value in out.grad_fn.call if isinstance(value, Tensor)]
        assert not held
        assert out.grad_fn.call.segments is None
