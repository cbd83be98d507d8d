"""Bad input: kind of exception, the argument that the message names, and that nothing was written or launched."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cake_core import config
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.launches import recorded_launches
from cake_core.testing.operands import normal
from cake_gqa import backends, varlen_gqa_attention, varlen_gqa_attention_bwd, varlen_gqa_attention_fwd
from torch import Tensor

Call = Callable[[], Any]
ATTENTION: Any = varlen_gqa_attention  # for calls that no type checker lets pass, or follows
ATTENTION_BWD: Any = varlen_gqa_attention_bwd

BF16, F32, F64, META = torch.bfloat16, torch.float32, torch.float64, "meta"
# Two segments: 3 queries of 5 keys, 4 of 2; four query heads, two key heads.
Q, K, V = normal(0, 7, 4, 256), normal(1, 7, 2, 256), normal(2, 7, 2, 256)
DOUT = normal(3, 7, 4, 256)
CU_Q, CU_K = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 5, 7], dtype=torch.int32)
OUT, LSE = varlen_gqa_attention_fwd(Q, K, V, CU_Q, CU_K)
ROWS = torch.tensor([0, 1, 2, 3, 4, 3, 4], dtype=torch.int32)
with warnings.catch_warnings(action="ignore"):  # a prototype, says torch
    NESTED = torch._nested_tensor_from_tensor_list([torch.ones(3, 4, 256, dtype=BF16)])
FORWARD = {"q": Q, "k": K, "v": V, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
BACKWARD = {**FORWARD, "out": OUT, "lse": LSE, "dout": DOUT}


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def op(**changed: Any) -> Call:
    return lambda: varlen_gqa_attention(**{**FORWARD, "max_seqlen_k": 5, **changed})


def fwd(**changed: Any) -> Call:
    return lambda: varlen_gqa_attention_fwd(**{**FORWARD, **changed})


def bwd(**changed: Any) -> Call:
    return lambda: varlen_gqa_attention_bwd(**{**BACKWARD, "max_seqlen_k": 5, **changed})


def add(**changed: Any) -> Call:
    """A backward that adds to five rows."""
    rows = {"dk_acc": torch.ones(5, 2, 256), "dv_acc": torch.ones(5, 2, 256), "row_map": ROWS}
    return bwd(**{**rows, **changed})


def source(found: Any) -> Call:
    """A backward through autograd whose dkv_acc returns ``found``."""

    def run() -> None:
        q = Q.clone().requires_grad_()
        out = varlen_gqa_attention(q, K, V, CU_Q, CU_K, max_seqlen_k=5, dkv_acc=lambda: found)
        out.backward(DOUT)

    return run


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def zeros(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def shifted(like: Tensor) -> Tensor:
    """The same shape and dtype, dense, two bytes off the grid."""
    return torch.zeros(like.numel() + 1, dtype=like.dtype)[1:].view(like.shape)


def strided(t: Tensor) -> Tensor:
    """The same values with a token stride that is no multiple of 8."""
    wide = torch.zeros(t.shape[0], t.shape[1] * 256 + 4, dtype=t.dtype)
    view = wide[:, : t.shape[1] * 256].view(t.shape)
    return view.copy_(t)


def case(name: str, kind: type[Exception], named: str, call: Call) -> Any:
    return pytest.param(kind, named, call, id=name)


CASES = [
    # Python types of host arguments, and of operands.
    case("q-list", TypeError, r": q is list", op(q=[1.0])),
    case("k-none", TypeError, r": k is NoneType", op(k=None)),
    case("v-float", TypeError, r": v is float", op(v=1.0)),
    case("cu-q-list", TypeError, r": cu_seqlens_q is list", op(cu_seqlens_q=[0, 3, 7])),
    case("cu-k-tuple", TypeError, r": cu_seqlens_k is tuple", op(cu_seqlens_k=(0, 5, 7))),
    case("out-none", TypeError, r": out is NoneType", bwd(out=None)),
    case("lse-none", TypeError, r": lse is NoneType", bwd(lse=None)),
    case("dout-none", TypeError, r": dout is NoneType", bwd(dout=None)),
    case("out-number", TypeError, r": out is int", fwd(out=0)),
    case("dq-string", TypeError, r": dq is str", bwd(dq="dq")),
    case("row-map-list", TypeError, r": row_map is list", add(row_map=[0, 1, 2, 3, 4, 3, 4])),
    case("bound-missing", TypeError, r"max_seqlen_k", lambda: ATTENTION(**FORWARD)),
    case("bound-missing-bwd", TypeError, r"max_seqlen_k", lambda: ATTENTION_BWD(**BACKWARD)),
    case("bound-none", TypeError, r": max_seqlen_k is .*NoneType.*a host int", op(max_seqlen_k=None)),
    case("bound-bool", TypeError, r": max_seqlen_k is True \(bool\); needs a host int", op(max_seqlen_k=True)),
    case("bound-float", TypeError, r": max_seqlen_k is 3.0 \(float\); needs a host int", op(max_seqlen_k=3.0)),
    case("bound-tensor", TypeError, r": max_seqlen_k is a Tensor; needs a host int.*\.item\(\)",
         op(max_seqlen_k=torch.tensor(5))),
    case("bound-tensor-fwd", TypeError, r": max_seqlen_k is .*Tensor", fwd(max_seqlen_k=torch.tensor(5))),
    case("bound-tensor-bwd", TypeError, r": max_seqlen_k is .*Tensor", bwd(max_seqlen_k=torch.tensor(5))),
    case("scale-string", TypeError, r": softmax_scale is str", op(softmax_scale="1")),
    case("scale-bool", TypeError, r": softmax_scale is bool", op(softmax_scale=True)),
    case("scale-tensor", TypeError, r": softmax_scale is Tensor", op(softmax_scale=torch.ones(()))),
    case("source-tuple", TypeError, r": dkv_acc is tuple; needs a zero-argument callable", op(dkv_acc=(K, V))),
    case("return-lse-int", TypeError, r": return_lse is 1 \(int\)", op(return_lse=1)),
    case("check-int", TypeError, r": check_seqlens is 1 \(int\); needs True, False or None", op(check_seqlens=1)),
    case("dkv-dtype-string", TypeError, r": dkv_dtype is str", bwd(dkv_dtype="float32")),
    case("needs-bool", TypeError, r": needs is True", bwd(needs=True)),
    case("needs-ints", TypeError, r": needs is", bwd(needs=(1, 1))),
    case("keyword", TypeError, r"variant", op(variant="det")),
    case("positional-bound", TypeError, r"positional", lambda: ATTENTION(*FORWARD.values(), 5)),
    # Values of host arguments.
    case("scale-subnormal", ValueError, r": softmax_scale is 1e-40; needs 1.18e-38 to 3.4e\+38, an FP32 number",
         op(softmax_scale=1e-40)),
    case("scale-beyond-fp32", ValueError, r": softmax_scale is 1e\+39; needs 1.18e-38", fwd(softmax_scale=1e39)),
    case("scale-beyond-fp64", ValueError, r": softmax_scale is a larger int;", bwd(softmax_scale=10**400)),
    case("q-nested", ValueError, r": q is a nested tensor", op(q=NESTED)),
    case("k-nested", ValueError, r": k is a nested tensor", fwd(k=NESTED)),
    case("dout-nested", ValueError, r": dout is a nested tensor", bwd(dout=NESTED)),
    case("q-negated", ValueError, r": q is a negated view, strided", fwd(q=torch._neg_view(Q))),
    case("dout-negated", ValueError, r": dout is a negated view, strided", bwd(dout=torch._neg_view(DOUT))),
    case("lse-negated", ValueError, r": lse is a negated view, strided", bwd(lse=torch._neg_view(LSE))),
    case("cu-q-negated", ValueError, r": cu_seqlens_q is a negated view", op(cu_seqlens_q=torch._neg_view(CU_Q))),
    case("bound-negative", ValueError, r": max_seqlen_k is -1; needs at least 0", op(max_seqlen_k=-1)),
    case("scale-zero", ValueError, r": softmax_scale is 0", op(softmax_scale=0)),
    case("scale-negative", ValueError, r": softmax_scale is -1.0", op(softmax_scale=-1.0)),
    case("scale-nan", ValueError, r": softmax_scale is nan", op(softmax_scale=math.nan)),
    case("scale-inf", ValueError, r": softmax_scale is inf", op(softmax_scale=math.inf)),
    case("needs-three", ValueError, r": needs is", bwd(needs=(True,) * 3)),
    case("acc-alone", ValueError, r": dk_acc is given without dv_acc, row_map;", bwd(dk_acc=zeros(5, 2, 256))),
    case("accs-alone", ValueError, r": dk_acc, dv_acc is given without row_map;", add(row_map=None)),
    case("map-alone", ValueError, r": row_map is given without dk_acc, dv_acc;", bwd(row_map=ROWS)),
    case("map-and-one-acc", ValueError, r": dv_acc, row_map is given without dk_acc;", add(dk_acc=None)),
    case("map-and-dk", ValueError, r": dk is given with row_map;", add(dk=torch.zeros_like(K))),
    case("map-and-dv", ValueError, r": dv is given with row_map;", add(dv=torch.zeros_like(V))),
    case("map-and-dtype", ValueError, r": dkv_dtype is torch.float32 with row_map;", add(dkv_dtype=F32)),
    case("dq-not-needed", ValueError, r": dq is given but not asked for.*needs\[0\]",
         bwd(dq=torch.zeros_like(Q), needs=(False, True))),
    case("dk-not-needed", ValueError, r": dk is given but not asked for.*needs\[1\]",
         bwd(dk=torch.zeros_like(K), needs=(True, False))),
    case("map-not-needed", ValueError, r": dk_acc is given but not asked for", add(needs=(True, False))),
    # Devices.
    case("k-device", ValueError, r": k is on meta", op(k=K.to(META))),
    case("v-device", ValueError, r": v is on meta", op(v=V.to(META))),
    case("cu-q-device", ValueError, r": cu_seqlens_q is on meta", op(cu_seqlens_q=CU_Q.to(META))),
    case("cu-k-device", ValueError, r": cu_seqlens_k is on meta", op(cu_seqlens_k=CU_K.to(META))),
    case("out-device", ValueError, r": out is on meta; needs the device of q", fwd(out=OUT.to(META))),
    case("dout-device", ValueError, r": dout is on meta", bwd(dout=DOUT.to(META))),
    case("map-device", ValueError, r": row_map is on meta", add(row_map=ROWS.to(META))),
    case("acc-device", ValueError, r": dk_acc is on meta", add(dk_acc=zeros(5, 2, 256).to(META))),
    # Dtypes.
    case("q-half", ValueError, r": q is torch.float16", op(q=Q.half(), k=K.half(), v=V.half())),
    case("q-int", ValueError, r": q is torch.int32", op(q=Q.int(), k=K.int(), v=V.int())),
    case("k-dtype", ValueError, r": k is torch.float32; needs torch.bfloat16, the dtype of q", op(k=K.float())),
    case("v-dtype", ValueError, r": v is torch.float64", op(v=V.double())),
    case("q-dtype", ValueError, r": k is torch.bfloat16; needs torch.float32, the dtype of q", op(q=Q.float())),
    case("out-dtype", ValueError, r": out is torch.float32", bwd(out=OUT.float())),
    case("dout-dtype", ValueError, r": dout is torch.float32", bwd(dout=DOUT.float())),
    case("lse-dtype", ValueError, r": lse is torch.bfloat16; needs torch.float32", bwd(lse=LSE.bfloat16())),
    case("cu-q-int64", ValueError, r": cu_seqlens_q is torch.int64; needs torch.int32", op(cu_seqlens_q=CU_Q.long())),
    case("cu-k-float", ValueError, r": cu_seqlens_k is torch.float32", op(cu_seqlens_k=CU_K.float())),
    case("map-int64", ValueError, r": row_map is torch.int64", add(row_map=ROWS.long())),
    case("dkv-half", ValueError, r": dkv_dtype is torch.float16; needs torch.bfloat16 or torch.float32",
         bwd(dkv_dtype=torch.float16)),
    case("dkv-double", ValueError, r": dkv_dtype is torch.float64", bwd(dkv_dtype=F64)),
    case("given-out-dtype", ValueError, r": out is torch.float32", fwd(out=OUT.float())),
    case("given-lse-dtype", ValueError, r": lse is torch.float64", fwd(lse=LSE.double())),
    case("given-dq-dtype", ValueError, r": dq is torch.float32", bwd(dq=zeros(7, 4, 256))),
    case("given-dk-dtype", ValueError, r": dk is torch.float32; needs torch.bfloat16", bwd(dk=zeros(7, 2, 256))),
    case("given-dv-dtype", ValueError, r": dv is torch.bfloat16; needs torch.float32",
         bwd(dv=zeros(7, 2, 256, dtype=BF16), dkv_dtype=F32)),
    case("acc-dtype", ValueError, r": dk_acc is torch.bfloat16; needs torch.float32",
         add(dk_acc=zeros(5, 2, 256, dtype=BF16))),
    # Ranks, shapes and sizes.
    case("q-2d", ValueError, r": q is of shape \(7, 1024\)", op(q=Q.flatten(1))),
    case("q-4d", ValueError, r": q is of shape \(1, 7, 4, 256\)", op(q=Q[None])),
    case("k-2d", ValueError, r": k is of shape \(7, 512\)", op(k=K.flatten(1))),
    case("head-dim", ValueError, r": q is .*128.*256", op(q=Q[..., :128], k=K[..., :128], v=V[..., :128])),
    case("k-head-dim", ValueError, r": k is .*128.*256", op(k=K[..., :128], v=V[..., :128])),
    case("v-shape", ValueError, r": v is of shape \(6, 2, 256\); needs the shape of k, \(7, 2, 256\)", op(v=V[:6])),
    case("v-heads", ValueError, r": v is of shape \(7, 1, 256\)", op(v=V[:, :1])),
    case("no-heads", ValueError, r": q is of 0 heads", op(q=Q[:, :0])),
    case("no-key-heads", ValueError, r": k is of 0 heads", op(k=K[:, :0], v=V[:, :0])),
    case("indivisible-heads", ValueError, r": q is of 3 heads; needs a multiple of the 2 heads of k", op(q=Q[:, :3])),
    case("fewer-query-heads", ValueError, r": q is of 1 heads; .*2 heads of k", op(q=Q[:, :1])),
    case("out-shape", ValueError, r": out is of shape \(6, 4, 256\)", bwd(out=OUT[:6])),
    case("dout-shape", ValueError, r": dout is of shape \(7, 2, 256\)", bwd(dout=DOUT[:, :2])),
    case("lse-shape", ValueError, r": lse is of shape \(7, 4\); needs \[H_q, T_q\], \(4, 7\)", bwd(lse=LSE.T)),
    case("map-shape", ValueError, r": row_map is of shape \(6,\); needs \[T_k\], \(7,\)", add(row_map=ROWS[:6])),
    case("given-out-shape", ValueError, r": out is of shape \(8, 4, 256\)", fwd(out=zeros(8, 4, 256, dtype=BF16))),
    case("given-lse-shape", ValueError, r": lse is of shape \(7, 4\)", fwd(lse=zeros(7, 4))),
    case("given-dk-shape", ValueError, r": dk is of shape \(7, 4, 256\)", bwd(dk=zeros(7, 4, 256, dtype=BF16))),
    case("acc-heads", ValueError, r": dk_acc is of shape \(5, 4, 256\)", add(dk_acc=zeros(5, 4, 256))),
    case("acc-2d", ValueError, r": dk_acc is of shape \(5, 512\); needs shape \(5, 2, 256\)",
         add(dk_acc=zeros(5, 512))),
    case("accs-differ", ValueError, r": dv_acc is of shape \(6, 2, 256\); needs shape \(5, 2, 256\)",
         add(dv_acc=zeros(6, 2, 256))),
    # Strides and alignment.
    case("q-last-stride", ValueError, r": q is strided .*; needs last stride 1, .*16-byte",
         op(q=normal(0, 7, 4, 512)[..., ::2])),
    case("q-transposed", ValueError, r": q is strided", op(q=normal(0, 7, 256, 4).mT)),
    case("q-token-stride", ValueError, r": q is strided \(1028, 256, 1\).*multiples of 8", op(q=strided(Q))),
    case("k-base", ValueError, r": k is strided .*at 0x.*16-byte", op(k=shifted(K))),
    case("v-token-stride", ValueError, r": v is strided", op(v=strided(V))),
    case("q-expanded-fwd", ValueError, r": q is strided \(0, 256, 1\)", fwd(q=Q[:1].expand(7, 4, 256))),
    case("k-expanded-heads-bwd", ValueError, r": k is strided", bwd(k=K[:, :1].expand(7, 2, 256))),
    case("expanded-and-strided", ValueError, r": q is strided", op(q=normal(0, 1, 4, 512)[..., ::2].expand(7, 4, 256))),
    case("dout-expanded-bwd", ValueError, r": dout is strided \(0, 0, 0\)",
         bwd(dout=torch.ones((), dtype=BF16).expand(7, 4, 256))),
    case("dout-transposed-bwd", ValueError, r": dout is strided", bwd(dout=normal(3, 7, 256, 4).mT)),
    case("out-strided", ValueError, r": out is strided .*contiguous", bwd(out=normal(3, 4, 7, 256).transpose(0, 1))),
    case("lse-strided", ValueError, r": lse is strided .*contiguous", bwd(lse=zeros(7, 4).T)),
    case("given-out-strided", ValueError, r": out is strided .*contiguous",
         fwd(out=zeros(4, 7, 256, dtype=BF16).transpose(0, 1))),
    case("given-out-base", ValueError, r": out is at 0x.*16-byte", fwd(out=shifted(OUT))),
    case("given-dq-strided", ValueError, r": dq is strided", bwd(dq=zeros(7, 8, 256, dtype=BF16)[:, :4])),
    case("acc-strided", ValueError, r": dv_acc is strided", add(dv_acc=zeros(5, 4, 256)[:, :2])),
    # Offsets and row maps.
    case("cu-q-2d", ValueError, r": cu_seqlens_q is of shape \(1, 3\)", op(cu_seqlens_q=CU_Q[None])),
    case("cu-q-one", ValueError, r": cu_seqlens_q is of 1 entries; needs at least 2", op(cu_seqlens_q=CU_Q[:1])),
    case("cu-lengths", ValueError, r": cu_seqlens_k is of 2 entries; needs the 3 of cu_seqlens_q",
         op(cu_seqlens_k=ints(0, 7))),
    case("cu-q-strided", ValueError, r": cu_seqlens_q is strided", op(cu_seqlens_q=ints(0, 9, 3, 9, 7, 9)[::2])),
    case("map-strided", ValueError, r": row_map is strided", add(row_map=torch.stack((ROWS, ROWS), 1)[:, 0])),
    case("map-2d", ValueError, r": row_map is of shape \(7, 1\)", add(row_map=ROWS[:, None])),
    case("cu-q-not-from-zero", ValueError, r": cu_seqlens_q\[0\] is 1; needs 0", op(cu_seqlens_q=ints(1, 3, 7))),
    case("cu-k-decreasing", ValueError, r": cu_seqlens_k\[2\] is 4; needs at least 5", op(cu_seqlens_k=ints(0, 5, 4))),
    case("cu-q-short", ValueError, r": cu_seqlens_q\[2\] is 6; needs 7, the rows of q", op(cu_seqlens_q=ints(0, 3, 6))),
    case("cu-k-long", ValueError, r": cu_seqlens_k\[2\] is 8; needs 7, the rows of k", op(cu_seqlens_k=ints(0, 5, 8))),
    case("bound-small", ValueError, r": max_seqlen_k is 4; needs at least 5, the keys of segment 0",
         op(max_seqlen_k=4, check_seqlens=False)),
    case("bound-below-two", ValueError, r": max_seqlen_k is 1; needs at least 5, the keys of segment 1",
         op(max_seqlen_k=1, cu_seqlens_k=ints(0, 2, 7))),
    case("bound-zero", ValueError, r": max_seqlen_k is 0; .*segment 0", op(max_seqlen_k=0)),
    case("bound-small-fwd", ValueError, r": max_seqlen_k is 4;", fwd(max_seqlen_k=4)),
    case("bound-small-bwd", ValueError, r": max_seqlen_k is 4;", bwd(max_seqlen_k=4)),
    case("map-above", ValueError, r": row_map\[4\] is 5; .*below 5", add(row_map=ints(0, 1, 2, 3, 5, 3, 4))),
    case("map-negative", ValueError, r": row_map\[6\] is -1;", add(row_map=ints(0, 1, 2, 3, 4, 3, -1))),
    # Memory that two tensors share.
    case("out-is-q", ValueError, r": out is overlapping q", fwd(out=Q)),
    case("dq-is-dout", ValueError, r": dq is overlapping dout", bwd(dq=DOUT)),
    case("dk-is-k", ValueError, r": dk is overlapping k", bwd(dk=K)),
    case("one-acc-twice", ValueError, r": dk_acc is overlapping dv_acc",
         (lambda both: add(dk_acc=both[:5], dv_acc=both[4:9]))(zeros(9, 2, 256))),
    # What a source of destinations gives.
    case("source-none", ValueError, r"varlen_gqa_attention: dkv_acc\(\) is NoneType; needs \(dk_win, dv_win\) or "
         r"\(dk_acc, dv_acc, row_map\)", source(None)),
    case("source-list", ValueError, r": dkv_acc\(\) is list;", source([zeros(7, 2, 256), zeros(7, 2, 256)])),
    case("source-one", ValueError, r": dkv_acc\(\) is \(Tensor\);", source((zeros(7, 2, 256),))),
    case("source-four", ValueError, r": dkv_acc\(\) is \(", source((K, K, K, K))),
    case("source-of-none", ValueError, r": dkv_acc\(\) is \(Tensor, NoneType\);", source((zeros(7, 2, 256), None))),
    case("source-dtype", ValueError, r": dk_win of dkv_acc\(\) is torch.bfloat16; needs torch.float32",
         source((torch.zeros_like(K), torch.zeros_like(V)))),
    case("source-shape", ValueError, r": dv_win of dkv_acc\(\) is of shape \(6, 2, 256\)",
         source((zeros(7, 2, 256), zeros(6, 2, 256)))),
    case("source-map-dtype", ValueError, r": row_map of dkv_acc\(\) is torch.int64",
         source((zeros(5, 2, 256), zeros(5, 2, 256), ROWS.long()))),
    case("source-map-shape", ValueError, r": row_map of dkv_acc\(\) is of shape \(6,\)",
         source((zeros(5, 2, 256), zeros(5, 2, 256), ROWS[:6]))),
    case("source-map-above", ValueError, r": row_map of dkv_acc\(\)\[4\] is 4; .*below 4",
         source((zeros(4, 2, 256), zeros(4, 2, 256), ROWS))),
    case("source-acc-heads", ValueError, r": dk_acc of dkv_acc\(\) is of shape \(5, 1, 256\)",
         source((zeros(5, 1, 256), zeros(5, 1, 256), ROWS))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "named", "call"), CASES)
def test_bad_input_names_its_argument(kind: type[Exception], named: str, call: Call) -> None:
    with pytest.raises(kind, match=named) as caught:
        call()
    if "keyword" not in str(caught.value) and "positional" not in str(caught.value):
        assert "needs" in str(caught.value), "the message says what the argument needs"


def test_good_operands_are_taken() -> None:
    """What the cases change is what is refused."""
    rows = torch.ones(5, 2, 256), torch.ones(5, 2, 256)
    windows = torch.empty(7, 2, 256), torch.empty(7, 2, 256)
    for call in (op(), fwd(), bwd(), add(), source((*rows, ROWS)), source(windows), op(check_seqlens=True)):
        call()
    bwd(dkv_dtype=F32, dk=windows[0], dv=windows[1], dq=torch.empty_like(Q))()
    fwd(out=torch.empty_like(OUT), lse=torch.empty_like(LSE))()
    wide = {name: t.double() for name, t in BACKWARD.items() if t.is_floating_point()}
    bwd(**wide, dkv_dtype=F64)()


def test_the_message_names_the_function_that_the_user_called() -> None:
    for name, call in (
        ("varlen_gqa_attention", op(v=V[:6])),
        ("varlen_gqa_attention_fwd", fwd(v=V[:6])),
        ("varlen_gqa_attention_bwd", bwd(v=V[:6])),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: v is .*; needs "):
            call()


def test_a_missing_bound_is_not_asked_of_a_forward() -> None:
    fwd()()
    fwd(max_seqlen_k=5)()
    fwd(max_seqlen_k=7)()


@pytest.mark.parametrize("bound", [5, 6, 7, 10**9])
def test_a_bound_that_is_large_enough_is_taken_and_changes_nothing(bound: int) -> None:
    assert torch.equal(op(max_seqlen_k=bound)(), OUT)
    for grad, want in zip(bwd(max_seqlen_k=bound)(), bwd()(), strict=True):
        assert torch.equal(grad, want)


def test_the_order_of_checks() -> None:
    """Host arguments, devices, dtypes, shapes, strides, offsets, outputs, contents: the first fault is named."""
    faults: list[tuple[dict[str, Any], str]] = [
        ({"max_seqlen_k": None}, "max_seqlen_k"),
        ({"max_seqlen_k": -1}, "max_seqlen_k"),
        ({"k": K.to(META)}, "k is on"),
        ({"v": V.float()}, "v is torch.float32"),
        ({"dout": DOUT[:6]}, "dout is of shape"),
        ({"out": torch.zeros(4, 7, 256, dtype=BF16).transpose(0, 1)}, "out is strided"),
        ({"cu_seqlens_q": CU_Q.long()}, "cu_seqlens_q is"),
        ({"dq": torch.empty(7, 4, 256)}, "dq is"),
        ({"cu_seqlens_k": ints(0, 5, 8)}, r"cu_seqlens_k\[2\]"),
    ]
    changed: dict[str, Any] = {}
    for fault, named in reversed(faults):
        changed |= fault
        with pytest.raises((TypeError, ValueError), match=f"bwd: {named}"):
            bwd(**changed)()


def test_nothing_is_written_before_a_refusal() -> None:
    """Outputs that are fine keep their bits when another argument is not, the row map's contents included."""
    outputs = {"dq": torch.full_like(Q, 7.0), "dk": torch.full_like(K, 7.0), "dv": torch.full_like(V, 7.0)}
    with pytest.raises(ValueError, match="max_seqlen_k"):
        bwd(**outputs, max_seqlen_k=4)()
    rows = {"dk_acc": torch.full((5, 2, 256), 7.0), "dv_acc": torch.full((5, 2, 256), 7.0)}
    with pytest.raises(ValueError, match="row_map"):
        add(**rows, dq=outputs["dq"], row_map=ints(0, 1, 2, 3, 4, 3, 5))()
    with pytest.raises(ValueError, match="row_map"):
        source((*rows.values(), ints(0, 1, 2, 3, 4, 3, 5)))()
    assert all((value == 7.0).all() for value in (*outputs.values(), *rows.values()))


def test_offsets_without_memory_are_refused() -> None:
    """As a sharded module leaves them: the host would read address 0."""
    freed = CU_Q.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="cu_seqlens_q is without memory"):
        op(cu_seqlens_q=freed)()


# --- results of collectives -------------------------------------------------------------------------------------


def running(t: Tensor) -> Tensor:
    """The result of a collective that still runs: a wrapper whose own address is 0."""
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    return collectives.AsyncCollectiveTensor(t)


def test_the_result_of_a_running_collective_is_waited_for() -> None:
    for name in ("q", "k", "v", "cu_seqlens_k"):
        assert torch.equal(op(**{name: running(FORWARD[name])})(), OUT)
    want = bwd()()
    for name in ("k", "dout", "lse"):
        for grad, expected in zip(bwd(**{name: running(BACKWARD[name])})(), want, strict=True):
            assert torch.equal(grad, expected)
    q = Q.clone().requires_grad_()
    out = varlen_gqa_attention(q, K, V, CU_Q, CU_K, max_seqlen_k=5)
    (grad,) = torch.autograd.grad(out, q, running(DOUT))
    assert torch.equal(grad, want[0])


def test_a_running_collective_cannot_be_in_a_call_that_writes_to_given_tensors() -> None:
    """No operator stands for such a call."""
    windows = torch.empty(7, 2, 256), torch.empty(7, 2, 256)
    for call, text in (
        (fwd(k=running(K), out=torch.empty_like(OUT)), "k is of class AsyncCollectiveTensor; .* given outputs"),
        (bwd(dout=running(DOUT), dq=torch.empty_like(Q)), "dout is of class AsyncCollectiveTensor; .* given outputs"),
        (add(row_map=running(ROWS)), "row_map is of class AsyncCollectiveTensor"),
        (op(v=running(V), dkv_acc=lambda: windows), "v is of class AsyncCollectiveTensor; .* dkv_acc"),
        (source((torch.ones(5, 2, 256), torch.ones(5, 2, 256), running(ROWS))), r"row_map of dkv_acc\(\) is of class"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


# --- devices ----------------------------------------------------------------------------------------------------

ON_CUDA = {
    "op": lambda q, k, v, a, b: varlen_gqa_attention(q, k, v, a, b, max_seqlen_k=5),
    "fwd": lambda q, k, v, a, b: varlen_gqa_attention_fwd(q, k, v, a, b),
    "bwd": lambda q, k, v, a, b: varlen_gqa_attention_bwd(
        q, k, v, q, q.new_empty(4, 7).float(), q, a, b, max_seqlen_k=5
    ),
}


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (12, 0)])
def test_a_device_without_kernels_is_not_implemented(name: str, capability: tuple[int, int]) -> None:
    """Names the device, its capability and what is served, before dtypes are looked at; nothing is launched."""
    text = rf": device cuda:0 is of compute capability {capability[0]}\.{capability[1]}; needs a supported architecture"
    with FakeCuda(capability=capability) as fake, recorded_launches() as launches:
        for dtype in (BF16, F32):
            given = [fake.cuda(t.to(dtype) if t.is_floating_point() else t) for t in FORWARD.values()]
            with pytest.raises(NotImplementedError, match=text):
                ON_CUDA[name](*given)
        assert not launches


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_107a"])
def test_a_device_whose_kernels_are_not_installed_is_a_runtime_error(name: str, arch: str) -> None:
    if arch in backends.CUDA:
        pytest.skip("installed")
    capability = {"sm_100a": (10, 0), "sm_103a": (10, 3), "sm_107a": (10, 7)}[arch]
    with FakeCuda(capability=capability) as fake, recorded_launches() as launches:
        with pytest.raises(RuntimeError, match=rf": device cuda:0 is of architecture {arch}") as caught:
            ON_CUDA[name](*(fake.cuda(t) for t in FORWARD.values()))
        assert not isinstance(caught.value, NotImplementedError)
        assert not launches


def test_another_kind_of_device_is_not_implemented() -> None:
    with FakeCuda() as fake:
        fake.device_of = lambda tensor: ("xpu", 0)  # type: ignore[method-assign]
        with pytest.raises(NotImplementedError, match=r"varlen_gqa_attention: q is on .*; needs a CPU or a CUDA"):
            op()()


def test_operands_on_several_devices_are_refused() -> None:
    with FakeCuda(devices=2) as fake:
        q, k, v, cu_q, cu_k = (fake.cuda(t) for t in FORWARD.values())
        for name, changed in (
            ("k", (q, fake.cuda(K, 1), v, cu_q, cu_k)),
            ("v", (q, k, V, cu_q, cu_k)),
            ("cu_seqlens_q", (q, k, v, CU_Q, cu_k)),
            ("cu_seqlens_k", (q, k, v, cu_q, fake.cuda(CU_K, 1))),
        ):
            with pytest.raises(ValueError, match=rf": {name} is on .*; needs the device of q"):
                varlen_gqa_attention(*changed, max_seqlen_k=5)


def test_an_operand_without_strides_is_refused() -> None:
    with pytest.raises(ValueError, match=r": q is of layout torch\.sparse_coo; needs torch.strided"):
        op(q=Q.to_sparse())()


# --- autocast and transforms ------------------------------------------------------------------------------------


def test_autocast_casts_nothing() -> None:
    """A mixed call is refused by name, one of a single dtype has the bits it has outside."""
    wide = [t.float() for t in (Q, K, V)]
    want = ATTENTION(*wide, CU_Q, CU_K, max_seqlen_k=5)
    with torch.autocast("cpu", dtype=BF16):
        with pytest.raises(ValueError, match=r"varlen_gqa_attention: k is torch.bfloat16; needs torch.float32.* of q"):
            op(q=Q.float())()
        assert torch.equal(op()(), OUT)
        leaves = [t.clone().requires_grad_() for t in wide]
        got = ATTENTION(*leaves, CU_Q, CU_K, max_seqlen_k=5)
        assert torch.equal(got, want)
        got.backward(DOUT.float())
    assert leaves[0].grad is not None
    plain = [t.clone().requires_grad_() for t in wide]
    ATTENTION(*plain, CU_Q, CU_K, max_seqlen_k=5).backward(DOUT.float())
    for a, b in zip(leaves, plain, strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_transforms_and_forward_mode_are_refused() -> None:
    def call(q: Tensor) -> Tensor:
        return varlen_gqa_attention(q, K, V, CU_Q, CU_K, max_seqlen_k=5)

    with pytest.raises(RuntimeError, match=r"varlen_gqa_attention: q is inside a torch\.func transform"):
        torch.vmap(call)(Q[None])
    with pytest.raises(RuntimeError, match=r"q is inside a torch\.func transform"):
        torch.func.grad(lambda q: call(q).float().sum())(Q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q, Q)
        with pytest.raises(RuntimeError, match="q is a forward-mode dual tensor"):
            call(dual)


@pytest.mark.parametrize("again", range(3))
@pytest.mark.parametrize("first", range(3))
def test_a_second_derivative_is_refused(first: int, again: int) -> None:
    """By every operand, of the gradient of every operand."""
    leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
    out = varlen_gqa_attention(*leaves, CU_Q, CU_K, max_seqlen_k=5)
    (grad,) = torch.autograd.grad(out, leaves[first], DOUT, create_graph=True)
    with pytest.raises(RuntimeError, match="gqa: a gradient is differentiated again"):
        torch.autograd.grad(grad.float().sum(), leaves[again])


def test_the_stride_of_a_dimension_of_one_may_be_anything() -> None:
    """A kernel never takes that step."""
    base = normal(0, 4000, dtype=F32)
    cu = torch.tensor([0, 1], dtype=torch.int32)
    key = normal(1, 1, 1, 256, dtype=F32)
    for sizes, strides in (((1, 4, 256), (5, 256, 1)), ((1, 1, 256), (3, 7, 1))):
        q = base.as_strided(sizes, strides)
        assert torch.equal(
            varlen_gqa_attention_fwd(q, key, key, cu, cu)[0],
            varlen_gqa_attention_fwd(q.contiguous(), key, key, cu, cu)[0],
        )
    cu = torch.tensor([0, 7], dtype=torch.int32)
    rows = base.as_strided((7, 1, 256), (256, 3, 1))
    varlen_gqa_attention_fwd(rows, rows, rows, cu, cu)


def test_more_rows_than_a_kernel_counts_are_refused() -> None:
    key, cu = normal(1, 1, 1, 256), torch.tensor([0, 1], dtype=torch.int32)
    many = key.expand(2**31 - 256, 1, 256)
    for name, q, k in (("q", many, key), ("k", key, many)):
        with pytest.raises(ValueError, match=f": {name} is of 2147483392 tokens; needs at most 2147483391"):
            varlen_gqa_attention(q, k, k, cu, cu, max_seqlen_k=1)
