"""Every row of the error table: the kind, the argument, what it got, and nothing written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cake_conv1d import (
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_kcp,
    causal_conv1d_kcp_multi,
    conv_final_state,
)
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.launches import recorded_launches
from torch.autograd import forward_ad

BF16 = torch.bfloat16
X, W, DY = torch.ones(6, 8, dtype=BF16), torch.ones(8, 4, dtype=BF16), torch.ones(6, 8, dtype=BF16)
XB = torch.ones(2, 3, 8, dtype=BF16)
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
STATE = torch.ones(2, 3, 8, dtype=BF16)
META = torch.device("meta")
with warnings.catch_warnings(action="ignore"):  # a prototype, says torch
    NESTED = torch._nested_tensor_from_tensor_list([torch.ones(3, 8, dtype=BF16), torch.ones(2, 8, dtype=BF16)])
SILU_ARRAY = np.array(["silu"])


def like(t: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype or t.dtype)


def case(name: str, kind: type[Exception], named: str, call: Callable[[], object]) -> Any:
    return pytest.param(kind, named, call, id=name)


def fwd(**given: Any) -> Callable[[], object]:
    operands = {"x": X, "weight": W, "cu_seqlens": CU, **given}
    return lambda: causal_conv1d_fwd(**operands)


def bwd(**given: Any) -> Callable[[], object]:
    operands = {"x": X, "weight": W, "dy": DY, "cu_seqlens": CU, **given}
    return lambda: causal_conv1d_bwd(**operands)


def final(**given: Any) -> Callable[[], object]:
    operands = {"x": X, "width": 4, "cu_seqlens": CU, **given}
    return lambda: conv_final_state(**operands)


CASES = [
    # Python types.
    case("x-list", TypeError, r": x is list", fwd(x=[1.0])),
    case("x-none", TypeError, r": x is NoneType", fwd(x=None)),
    case("weight-none", TypeError, r": weight is NoneType", fwd(weight=None)),
    case("weight-array", TypeError, r": weight is list", fwd(weight=[[1.0]])),
    case("cu-list", TypeError, r": cu_seqlens is list", fwd(cu_seqlens=[0, 6])),
    case("cu-tuple", TypeError, r": cu_seqlens is tuple", fwd(cu_seqlens=(0, 6))),
    case("state-list", TypeError, r": initial_state is list", fwd(initial_state=[])),
    case("dy-list", TypeError, r": dy is list", bwd(dy=[1.0])),
    case("d-final-list", TypeError, r": d_final_state is list", bwd(d_final_state=[])),
    case("activation-bool", TypeError, r": activation is", fwd(activation=True)),
    case("activation-callable", TypeError, r": activation is", fwd(activation=torch.nn.functional.silu)),
    case("keyword", TypeError, r"variant", fwd(variant="det")),
    case("bias-keyword", TypeError, r"bias", fwd(bias=torch.ones(8))),
    case("out-list", TypeError, r": out is list", fwd(out=[])),
    case("needs-string", TypeError, r": needs is", bwd(needs="xyz")),
    case("needs-ints", TypeError, r": needs is", bwd(needs=(1, 1, 0))),
    case("needs-length", ValueError, r": needs is", bwd(needs=(True, True))),
    case("width-bool", TypeError, r": width is", final(width=True)),
    case("width-float", TypeError, r": width is", final(width=4.0)),
    case("output-final-int", TypeError, r"output_final_state", lambda: causal_conv1d(X, W, output_final_state=1)),
    case("activation-array", TypeError, r": activation is array.*; needs a str or None", fwd(activation=SILU_ARRAY)),
    case("activation-false", TypeError, r": activation is False \(bool\); needs a str or None", fwd(activation=False)),
    case("activation-zero", TypeError, r": activation is 0 \(int\); needs a str or None", fwd(activation=0)),
    # Values of host arguments.
    case("activation", ValueError, r": activation is 'gelu'.*silu", fwd(activation="gelu")),
    case("activation-case", ValueError, r": activation is 'SiLU'", fwd(activation="SiLU")),
    case("width-huge", ValueError, r": width is 1099511627776; needs at most", final(width=2**40)),
    case("width-one", ValueError, r": width is 1", final(width=1)),
    # Tensors without a shape.
    case("x-nested", ValueError, r"_fwd: x is a nested tensor", fwd(x=NESTED)),
    case("x-nested-state", ValueError, r"_state: x is a nested tensor", final(x=NESTED)),
    case("weight-nested", ValueError, r": weight is a nested tensor", fwd(weight=NESTED)),
    case("cu-nested", ValueError, r": cu_seqlens is a nested tensor", fwd(cu_seqlens=NESTED)),
    case("state-nested", ValueError, r": initial_state is a nested tensor", fwd(initial_state=NESTED)),
    case("dy-nested", ValueError, r": dy is a nested tensor", bwd(dy=NESTED)),
    case("dx-nested", ValueError, r": dx is a nested tensor", bwd(dx=NESTED)),
    case("x-local-nested", ValueError, r": x_local is a nested tensor", lambda: causal_conv1d_kcp(NESTED, W, object())),
    case(
        "weight-uninitialized",
        ValueError,
        r": weight is an UninitializedParameter",
        fwd(weight=torch.nn.parameter.UninitializedParameter()),
    ),
    # Devices.
    case("weight-device", ValueError, r": weight is on meta", fwd(weight=W.to(META))),
    case("cu-device", ValueError, r": cu_seqlens is on meta", fwd(cu_seqlens=CU.to(META))),
    case("state-device", ValueError, r": initial_state is on meta", fwd(initial_state=STATE.to(META))),
    case("dy-device", ValueError, r": dy is on meta", bwd(dy=DY.to(META))),
    # Dtypes.
    case("x-half", ValueError, r": x is torch.float16.*bfloat16", fwd(x=X.half())),
    case("x-int", ValueError, r": x is torch.int64", fwd(x=X.long())),
    case("x-complex", ValueError, r": x is torch.complex64", fwd(x=X.cfloat())),
    case("weight-half", ValueError, r": weight is torch.float16", fwd(weight=W.half())),
    case("weight-int", ValueError, r": weight is torch.int32", fwd(weight=W.int())),
    case("state-half", ValueError, r": initial_state is torch.float16", fwd(initial_state=STATE.half())),
    case("dy-int", ValueError, r": dy is torch.int64", bwd(dy=DY.long())),
    case("cu-float", ValueError, r": cu_seqlens is torch.float32", fwd(cu_seqlens=CU.float())),
    case("cu-bool", ValueError, r": cu_seqlens is torch.bool", fwd(cu_seqlens=CU.bool())),
    case("cu-int16", ValueError, r": cu_seqlens is torch.int16", fwd(cu_seqlens=CU.short())),
    # Ranks, shapes and sizes.
    case("x-1d", ValueError, r": x is .*\(8,\)", fwd(x=X[0])),
    case("x-4d", ValueError, r": x is .*1, 1, 6, 8", fwd(x=X[None, None])),
    case("no-channels", ValueError, r": x ", fwd(x=X[:, :0], weight=W[:0])),
    case("weight-rows", ValueError, r": weight is .*\b7\b.*\b8\b", fwd(weight=W[:7])),
    case("weight-1d", ValueError, r": weight is .*\(8,\)", fwd(weight=W[:, 0])),
    case("weight-dense-conv", ValueError, r": weight is .*8, 2, 4", fwd(weight=like(W, 8, 2, 4))),
    case("weight-transposed", ValueError, r": weight is .*\b4\b.*\b8\b", fwd(weight=W.t())),
    case("weight-one-tap", ValueError, r": weight is .*8, 1", fwd(weight=W[:, :1])),
    case("batch-with-offsets", ValueError, r"cu_seqlens|x", fwd(x=XB)),
    case("cu-2d", ValueError, r": cu_seqlens is .*1, 3", fwd(cu_seqlens=CU[None])),
    case("cu-0d", ValueError, r": cu_seqlens is", fwd(cu_seqlens=CU[0])),
    case("cu-short", ValueError, r": cu_seqlens is", fwd(cu_seqlens=CU[:1])),
    case("cu-empty", ValueError, r": cu_seqlens is", fwd(cu_seqlens=CU[:0])),
    case("state-documents", ValueError, r": initial_state is .*1, 3, 8.*2, 3, 8", fwd(initial_state=STATE[:1])),
    case("state-rows", ValueError, r": initial_state is .*2, 2, 8", fwd(initial_state=STATE[:, :2])),
    case("state-transposed", ValueError, r": initial_state is .*2, 8, 3", fwd(initial_state=STATE.transpose(1, 2))),
    case("state-of-taps", ValueError, r": initial_state is .*2, 4, 8", fwd(initial_state=like(STATE, 2, 4, 8))),
    case("state-2d", ValueError, r": initial_state is", fwd(initial_state=STATE[0])),
    case("dy-shape", ValueError, r": dy is .*\(5, 8\)", bwd(dy=DY[:5])),
    case("dy-broadcast", ValueError, r": dy is .*\(1, 8\)", bwd(dy=DY[:1])),
    case("dy-leading-one", ValueError, r": dy is .*1, 6, 8", bwd(dy=DY[None])),
    case("d-final-shape", ValueError, r": d_final_state is", bwd(d_final_state=STATE[:1])),
    case("final-state-documents", ValueError, r": initial_state is", final(initial_state=STATE[:1])),
    # Contents of the offsets: free to check on the CPU.
    case(
        "cu-not-from-zero", ValueError, r": cu_seqlens\[0\] is 1; needs 0", fwd(cu_seqlens=torch.tensor([1, 6]).int())
    ),
    case(
        "cu-decreasing",
        ValueError,
        r": cu_seqlens\[2\] is 2; needs .*4",
        fwd(cu_seqlens=torch.tensor([0, 4, 2, 6]).int()),
    ),
    case(
        "cu-short-of-the-end",
        ValueError,
        r": cu_seqlens\[2\] is 5; needs 6",
        fwd(cu_seqlens=torch.tensor([0, 2, 5]).int()),
    ),
    case(
        "cu-past-the-end", ValueError, r": cu_seqlens\[2\] is 7; needs 6", fwd(cu_seqlens=torch.tensor([0, 2, 7]).int())
    ),
    # Given outputs.
    case("out-shape", ValueError, r": out is .*\(5, 8\)", fwd(out=like(X, 5, 8))),
    case("out-dtype", ValueError, r": out is torch.float32", fwd(out=X.float())),
    case("out-device", ValueError, r": out is on meta", fwd(out=X.to(META))),
    case("out-is-x", ValueError, r": out is overlapping x", fwd(out=X)),
    case("out-expanded", ValueError, r": out is strided", fwd(out=like(X, 1, 8).expand(6, 8))),
    case("dx-is-dy", ValueError, r": dx is overlapping dy", bwd(dx=DY)),
    case("dx-dtype", ValueError, r": dx is torch.float32", bwd(dx=like(X, 6, 8, dtype=torch.float32))),
    case("dweight-shape", ValueError, r": dweight is", bwd(dweight=like(W, 7, 4))),
    case("dweight-is-weight", ValueError, r": dweight is overlapping weight", bwd(dweight=W)),
    case("dweight-dtype", ValueError, r": dweight is torch.float64", bwd(dweight=W.double())),
    case(
        "dx-not-asked-for",
        ValueError,
        r": dx is given but not asked for; needs True for dx in needs",
        bwd(dx=like(X, 6, 8), needs=(False, True, False)),
    ),
    # Sequences of the multi call.
    case("xs-tensor", TypeError, r": xs is Tensor", lambda: causal_conv1d_kcp_multi(X, [W], object())),
    case(
        "weights-tensor",
        TypeError,
        r": weights is (Tensor|Parameter)",
        lambda: causal_conv1d_kcp_multi([X], W, object()),
    ),
]


@pytest.mark.parametrize(("kind", "named", "call"), CASES)
def test_bad_input_names_its_argument(kind: type[Exception], named: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=named) as caught:
        call()
    if "keyword" not in str(caught.value):
        assert "needs" in str(caught.value), "the message says what the argument needs"


def test_the_message_names_the_function_that_the_user_called() -> None:
    half = X.half()
    for name, call in (
        ("causal_conv1d", lambda: causal_conv1d(half, W)),
        ("causal_conv1d_fwd", lambda: causal_conv1d_fwd(half, W)),
        ("causal_conv1d_bwd", lambda: causal_conv1d_bwd(half, W, DY)),
        ("conv_final_state", lambda: conv_final_state(half, 4)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: x is .*float16.*; needs "):
            call()


def test_a_batch_with_offsets_says_what_to_do() -> None:
    """fla PR 955: counted per row, the boundaries gave a silently wrong dweight."""
    rows = torch.tensor([0, 2, 3], dtype=torch.int32)  # the offsets of one row, which fit its tokens
    for cu in (CU, rows):
        for call in (
            lambda cu: causal_conv1d(XB, W, cu),
            lambda cu: causal_conv1d_fwd(XB, W, cu),
            lambda cu: causal_conv1d_bwd(XB, W, XB, cu),
            lambda cu: conv_final_state(XB, 4, cu),
        ):
            with pytest.raises(ValueError, match=r": x is of shape \(2, 3, 8\); needs .*cu_seqlens"):
                call(cu)


def test_rows_of_a_batch_are_not_told_to_come_without_offsets_in_a_context() -> None:
    with pytest.raises(ValueError, match=r"causal_conv1d_kcp: x_local is of shape \(2, 3, 8\)") as caught:
        causal_conv1d_kcp(XB, W, object())
    assert "without offsets" not in str(caught.value)


def test_a_refused_call_leaves_given_outputs_as_they_were() -> None:
    out, dx, dw = torch.full((6, 8), 3.0, dtype=BF16), torch.full((6, 8), 4.0, dtype=BF16), torch.full((8, 4), 5.0)
    for call in (fwd(out=out, cu_seqlens=torch.tensor([0, 7]).int()), bwd(dx=dx, dweight=dw, dy=DY[:5])):
        with pytest.raises(ValueError):  # noqa: PT011
            call()
    assert (out == 3.0).all()
    assert (dx == 4.0).all()
    assert (dw == 5.0).all()


@pytest.mark.parametrize("shift", [1, 7, 8])
def test_an_output_that_overlaps_an_input_partly_is_refused(shift: int) -> None:
    memory = torch.ones(7 * 8, dtype=BF16)
    x, out = memory[: 6 * 8].view(6, 8), memory[shift : shift + 6 * 8].view(6, 8)
    with pytest.raises(ValueError, match="out is overlapping x"):
        causal_conv1d_fwd(x, W, out=out)


def test_the_columns_of_a_packed_gradient_do_not_overlap() -> None:
    """dx beside what other layers wrote, in the gradient of the fused projection."""
    packed = torch.zeros(6, 24, dtype=BF16)
    causal_conv1d_bwd(X, W, DY, dx=packed[:, 8:16])
    assert packed[:, 8:16].any()
    assert not packed[:, :8].any()


def test_an_output_may_be_other_columns_of_an_input_s_buffer() -> None:
    wide, grads = torch.ones(6, 16, dtype=BF16), torch.ones(6, 16, dtype=BF16)
    want = causal_conv1d_fwd(X, W, CU)
    assert torch.equal(causal_conv1d_fwd(wide[:, :8], W, CU, out=wide[:, 8:]), want)
    assert (wide[:, :8] == 1.0).all()
    assert torch.equal(wide[:, 8:], want)
    dx = causal_conv1d_bwd(X, W, grads[:, 8:], CU, dx=grads[:, :8])[0]
    want = causal_conv1d_bwd(X, W, DY, CU)[0]
    assert dx is not None
    assert want is not None
    assert torch.equal(dx, want)
    batch = torch.ones(2, 3, 16, dtype=BF16)
    assert torch.equal(causal_conv1d_fwd(batch[..., :8], W, out=batch[..., 8:]), causal_conv1d_fwd(XB, W))


@pytest.mark.parametrize("name", ["out", "dx", "dweight"])
def test_an_inference_tensor_is_refused_before_it_is_written(name: str) -> None:
    with torch.inference_mode():
        given = torch.full((8, 4) if name == "dweight" else (6, 8), 7.0, dtype=BF16)
    with pytest.raises(ValueError, match=f": {name} is an inference tensor; needs "):
        (fwd if name == "out" else bwd)(**{name: given})()
    assert (given == 7.0).all()
    with torch.inference_mode():
        (fwd if name == "out" else bwd)(**{name: given})()
    assert not (given == 7.0).all()


def test_what_the_cpu_serves_and_cuda_does_not_is_refused_by_dtype_and_size() -> None:
    """FP32 x on CUDA names its dtype, C % 8, W in 2..4; before any launch."""
    with FakeCuda() as fake, recorded_launches() as launches:
        x, w = fake.cuda(X), fake.cuda(W)
        calls: dict[str, Callable[[], object]] = {
            r": x is torch\.float32.*bfloat16": lambda: causal_conv1d(x.float(), w),
            r": x is torch\.float16.*bfloat16": lambda: causal_conv1d(x.half(), w),
            r": x is torch\.float64.*bfloat16": lambda: causal_conv1d(x.double(), w.double()),
            r": weight is torch\.float64": lambda: causal_conv1d(x, w.double()),
            r": x is .*6, 4": lambda: causal_conv1d(x[:, :4], w[:4]),
            r": x is .*6, 7": lambda: causal_conv1d(x[:, :7], w[:7]),
            r": weight is .*8, 5": lambda: causal_conv1d(x, torch.ones(8, 5, device="cuda")),
            r": weight is .*8, 1": lambda: causal_conv1d(x, torch.ones(8, 1, device="cuda")),
            r": weight is on cpu": lambda: causal_conv1d(x, W),
            r": cu_seqlens is on cpu": lambda: causal_conv1d(x, w, CU),
            r": width is 5": lambda: conv_final_state(x, 5),
            r": initial_state is torch\.float64": lambda: causal_conv1d(
                x, w, initial_state=torch.ones(1, 3, 8, device="cuda", dtype=torch.float64)
            ),
        }
        for text, call in calls.items():
            with pytest.raises(ValueError, match=text):
                call()
        assert not launches


def test_a_device_without_a_backend_is_not_implemented() -> None:
    with FakeCuda(capability=(7, 5)) as fake, recorded_launches() as launches:
        x, w = fake.cuda(X), fake.cuda(W)
        for call in (lambda: causal_conv1d(x, w), lambda: causal_conv1d_fwd(x, w), lambda: causal_conv1d_bwd(x, w, x)):
            with pytest.raises(NotImplementedError, match=r"7\.5"):
                call()
        assert not launches


def test_an_operand_without_strides_is_refused() -> None:
    x, w = X.float(), W.float()
    for convert in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn):
        with pytest.raises(ValueError, match=r": x is of layout torch\.\w+; needs torch.strided"):
            causal_conv1d(convert(x), w)
        with pytest.raises(ValueError, match=r": weight is of layout"):
            causal_conv1d(x, convert(w))


@pytest.mark.parametrize("dweight", [[1], torch.zeros(8, 4).to_sparse()], ids=["list", "sparse"])
def test_a_wrong_output_is_named_whatever_stands_beside_it(dweight: Any) -> None:
    x, w = X.float(), W.float()
    with pytest.raises((TypeError, ValueError), match=r"causal_conv1d_bwd: dweight is"):
        causal_conv1d_bwd(x, w, x, dx=torch.empty_like(x), dweight=dweight)


def test_tangents_of_the_gradients_are_refused() -> None:
    x, w = X.float(), W.float()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="causal_conv1d_bwd: dy is a forward-mode dual tensor"):
            causal_conv1d_bwd(x, w, dual)
        state = forward_ad.make_dual(torch.ones(1, 3, 8), torch.ones(1, 3, 8))
        with pytest.raises(RuntimeError, match="causal_conv1d_bwd: d_final_state is a forward-mode dual tensor"):
            causal_conv1d_bwd(x, w, x, d_final_state=state)


def test_offsets_without_memory_are_refused() -> None:
    cu = torch.tensor([0, X.shape[0]])
    cu.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="causal_conv1d: cu_seqlens is without memory"):
        causal_conv1d(X.float(), W.float(), cu)
