"""The bindings of the Hopper kernels: each operand that a kernel would misread is refused by name, before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cake_core.testing.cuda_on_cpu.emulation import OnFakeDevice, Program, randn
from cake_gqa import plan
from gqa_emulation import PROGRAMS
from torch import Tensor

BF16, FP32, INT32, BYTES = torch.bfloat16, torch.float32, torch.int32, torch.uint8
TQ, TK, HQ, HKV, B = 3, 5, 4, 2, 2
Call = dict[str, Any]

STRIDED = ("q", "k", "v", "dout")
"""[rows, heads, 256] in strides of whole vectors; all other operands are dense."""
RAW = ("table", "stats", "window", "links")
"""Scratch as raw bytes, at least so many."""
FIRST = {"gqa_plan": "cu_q", "gqa_bwd_pre": "out", "gqa_rowmap_add": "dk"}
"""The operand that decides where the call runs; else q."""


def calls() -> dict[str, Call]:
    """Every operand of every program, dense, in the order of its run."""
    q, k, v, dout = (randn(t, h, 256, seed=n) for n, (t, h) in enumerate(((TQ, HQ), (TK, HKV), (TK, HKV), (TQ, HQ))))
    cu_q, cu_k = torch.tensor([0, 2, TQ], dtype=INT32), torch.tensor([0, 4, TK], dtype=INT32)
    table = torch.zeros(plan.plan_bytes(B), dtype=BYTES)
    stats = torch.zeros(plan.stats_bytes(TQ, HQ, B), dtype=BYTES)
    lse = torch.zeros(HQ, TQ)
    offsets: Call = {"cu_q": cu_q, "cu_k": cu_k}
    operands: Call = {"q": q, "k": k, "v": v, "dout": dout, "stats": stats, "table": table, **offsets, "scale": 0.1}
    heads: Call = {"first_head": 0, "heads": HKV}
    keys: Call = {"dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    rows: Call = {"dk": torch.zeros(9, HKV, 256), "dv": torch.zeros(9, HKV, 256)}
    window, links = (torch.zeros(n, dtype=BYTES) for n in (plan.window_bytes(TK, HKV), plan.links_bytes(TK)))
    row_map = torch.arange(TK, dtype=INT32)
    return {
        "gqa_plan": {"table": table, **offsets, "rows_q": TQ, "rows_k": TK},
        "gqa_fwd": {
            "out": torch.zeros_like(q), "lse": lse, "q": q, "k": k, "v": v, "table": table, **offsets, "scale": 0.1,
        },
        "gqa_bwd_pre": {"stats": stats, "out": q, "dout": dout, "lse": lse, "cu_q": cu_q},
        "gqa_bwd_dkv": {**keys, "window": None, **operands, **heads, "pass": 0},
        "gqa_bwd_dq": {"dq": torch.zeros_like(q), **operands},
        "gqa_rowmap_add": {
            **rows, "window": window, "links": links, "row_map": row_map, **offsets, "rows_q": TQ, **heads,
        },
    }  # fmt: skip


def tensors(name: str) -> dict[str, Tensor]:
    return {operand: value for operand, value in calls()[name].items() if isinstance(value, Tensor)}


def run(programs: dict[str, Program], name: str, **change: Any) -> None:
    call = calls()[name]
    assert not change.keys() - call.keys()
    given = call | change
    made = {"gqa_plan", "gqa_bwd_pre", "gqa_rowmap_add"}
    if name not in made:  # nothing left of the tickets of a call before
        programs["gqa_plan"].run(given["table"], *(given[n] for n in ("cu_q", "cu_k")), TQ, TK)
    programs[name].run(*given.values())


def refused(programs: dict[str, Program], name: str, text: str, **change: Any) -> None:
    before = programs[name].launches()
    with pytest.raises(ValueError, match=text):
        programs[name].run(*(calls()[name] | change).values())
    assert programs[name].launches() == before, f"{name}: {change.keys()} launched"


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_call_that_the_others_change_is_served(programs: dict[str, Program], name: str) -> None:
    before = programs[name].launches()
    run(programs, name)
    assert programs[name].launches() == before + (3 if name == "gqa_rowmap_add" else 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operand_is_refused_on_another_device(programs: dict[str, Program], name: str) -> None:
    for operand, value in tensors(name).items():
        for where in ((2, 1), (1, 0)):
            text = rf"^{operand} is on device \({where[0]}, {where[1]}\); needs \(2, 0\), as the other operands"
            if operand == FIRST.get(name, "q"):
                text = r" is on device \(2, 0\); needs \(2, 1\)"
                if where[0] != 2:
                    text = f"^{operand} is on DLPack device type 1;"
            refused(programs, name, text, **{operand: OnFakeDevice(value, where)})


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operand_is_refused_in_another_dtype_and_rank(programs: dict[str, Program], name: str) -> None:
    for operand, value in tensors(name).items():
        wanted = {BF16: "bfloat16", FP32: "float32", INT32: "int32", BYTES: "uint8"}[value.dtype]
        dtypes = {torch.float64, torch.float16, torch.int64, FP32, BF16, INT32} - {value.dtype}
        for dtype in dtypes:
            text = rf"^{operand} is {str(dtype).removeprefix('torch.')}; needs {wanted}"
            if name == "gqa_bwd_dkv" and operand in ("dk", "dv") and dtype == FP32:
                text = "^dv is bfloat16; needs float32" if operand == "dk" else "^dv is float32; needs bfloat16"
            refused(programs, name, text, **{operand: value.to(dtype)})
        for other in (value[None], value[0]):
            text = rf"^{operand} has {other.dim()} dimensions; needs {value.dim()}"
            refused(programs, name, text, **{operand: other})


SIZES = {
    ("gqa_fwd", "q", 0): r"^out\.shape\[0\] is 3; needs",
    ("gqa_fwd", "q", 1): r"^q\.shape\[1\] is \d; needs a multiple of the 2 heads of k",
    ("gqa_fwd", "k", 0): r"^v\.shape\[0\] is 5; needs",
    ("gqa_fwd", "k", 1): r"^v\.shape\[1\] is 2; needs",
    ("gqa_bwd_dq", "q", 0): r"^dout\.shape\[0\] is 3; needs",
    ("gqa_bwd_dq", "q", 1): r"^dout\.shape\[1\] is 4; needs",
    ("gqa_bwd_dq", "k", 0): r"^v\.shape\[0\] is 5; needs",
    ("gqa_bwd_dq", "k", 1): r"^v\.shape\[1\] is 2; needs",
    ("gqa_bwd_pre", "out", 0): r"^dout\.shape\[0\] is 3; needs",
    ("gqa_bwd_pre", "out", 1): r"^dout\.shape\[1\] is 4; needs",
    ("gqa_rowmap_add", "dk", 0): r"^dv\.shape\[0\] is 9; needs",
    ("gqa_rowmap_add", "dk", 1): r"^dv\.shape\[1\] is 2; needs",
}
"""Where an operand says a size, which of the others differs. Of dK and dV as of dQ."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operand_is_refused_in_another_size(programs: dict[str, Program], name: str) -> None:
    """One more and one less of every dimension."""
    for operand, value in tensors(name).items():
        for dim, size in enumerate(value.shape):
            more = torch.cat([value, value.narrow(dim, 0, 1)], dim).contiguous()
            less = value.narrow(dim, 0, size - 1).contiguous()
            for other in (more, less):
                text = rf"^{operand}\.shape\[{dim}\] is {other.shape[dim]}; needs {size}"
                text = SIZES.get((name.replace("dkv", "dq"), operand, dim), text)
                if operand in ("cu_q", "row_map"):  # they say B and T_k
                    continue
                if operand in RAW:
                    if other is more or operand == "table":
                        continue
                    text = rf"^{operand} has {len(less)} bytes; needs {len(value)}"
                refused(programs, name, text, **{operand: other})


@pytest.mark.parametrize("name", PROGRAMS)
def test_offsets_and_maps_say_how_large_scratch_is(programs: dict[str, Program], name: str) -> None:
    call = calls()[name]
    cu = torch.zeros(B + 2, dtype=INT32)
    if "cu_k" in call:
        refused(programs, name, r"^cu_k\.shape\[0\] is 3; needs 4", cu_q=cu)
    if "table" in call:
        short = call["table"][: 4 * (16 + 3 * B) - 1]
        refused(programs, name, rf"^table has {len(short)} bytes; needs {len(short) + 1}", table=short)
    if "stats" in call and "cu_k" in call:
        many = torch.zeros(B + 100, dtype=INT32)
        room = torch.zeros(plan.plan_bytes(B + 100), dtype=BYTES)
        refused(programs, name, r"^stats has \d+ bytes; needs \d+", cu_q=many, cu_k=many, table=room)
    if "row_map" in call:
        more = torch.zeros(TK + 1, dtype=INT32)
        refused(programs, name, r"^window has \d+ bytes; needs \d+", row_map=more)
    none = torch.zeros(1, dtype=INT32)
    refused(programs, name, r"^cu_q\.shape\[0\] - 1 is 0; needs 1 to \d+", cu_q=none)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operand_is_refused_with_elements_apart_and_between_vectors(
    programs: dict[str, Program], name: str
) -> None:
    for operand, value in tensors(name).items():
        apart = OnFakeDevice(value, strides=[2 * stride for stride in value.stride()])
        text = rf"^{operand} is not contiguous; needs dense row-major elements"
        if operand in STRIDED or (name == "gqa_bwd_pre" and operand == "out"):
            text = rf"^{operand}\.stride\(2\) is 2; needs 1"
        refused(programs, name, text, **{operand: apart})
        if value.dtype in (INT32, FP32) and not (name == "gqa_rowmap_add" and operand in ("dk", "dv")):
            continue
        raw = torch.zeros(value.numel() + 16, dtype=value.dtype)[8 // value.element_size() :][: value.numel()]
        text = rf"^{operand} starts 8 bytes past a multiple of 16"
        refused(programs, name, text, **{operand: raw.view(value.shape)})


@pytest.mark.parametrize("name", PROGRAMS)
def test_strides_that_no_tensor_map_has_are_refused(programs: dict[str, Program], name: str) -> None:
    for operand, value in tensors(name).items():
        if operand not in STRIDED:
            continue
        token = value.stride(0)
        for dim, strides in enumerate(((token + 4, 256, 1), (token, 260, 1))):
            text = rf"^{operand}\.stride\({dim}\) is {strides[dim]}; needs a multiple of 8"
            refused(programs, name, text, **{operand: OnFakeDevice(value, strides=strides)})
            for bad in (-strides[dim] + 4, 0):
                odd = [*strides]
                odd[dim] = bad
                odd[1 - dim] = (token, 256)[1 - dim]
                text = rf"^{operand}\.stride\({dim}\) is {bad}; needs a"
                refused(programs, name, text, **{operand: OnFakeDevice(value, strides=odd)})


@pytest.mark.parametrize("name", ["gqa_fwd", "gqa_bwd_dkv", "gqa_bwd_dq"])
def test_a_stride_that_the_driver_refuses_is_an_error(programs: dict[str, Program], name: str) -> None:
    """2^40 bytes between two rows: nothing is launched, and no later call is blamed."""
    before = programs[name].launches()
    far = OnFakeDevice(calls()[name]["q"], strides=(2**39, 256, 1))
    with pytest.raises(RuntimeError, match=name):
        run(programs, name, q=far)
    assert programs[name].launches() == before
    run(programs, name)


@pytest.mark.parametrize("name", ["gqa_fwd", "gqa_bwd_pre", "gqa_bwd_dkv", "gqa_bwd_dq"])
def test_a_dimension_of_one_has_any_stride(programs: dict[str, Program], name: str) -> None:
    one_head = {o: t[:, :1].contiguous() for o, t in tensors(name).items() if t.dim() == 3}
    if "lse" in calls()[name]:
        one_head["lse"] = calls()[name]["lse"][:1]
    if name == "gqa_bwd_dkv":
        one_head["heads"] = 1
    for operand in one_head.keys() & set(STRIDED):
        odd = OnFakeDevice(one_head[operand], strides=(256, 999, 1))
        run(programs, name, **one_head | {operand: odd})


def test_dk_and_dv_or_a_window_of_some_heads(programs: dict[str, Program]) -> None:
    name = "gqa_bwd_dkv"
    dk, window = calls()[name]["dk"], torch.zeros(plan.window_bytes(TK, HKV), dtype=BYTES)
    run(programs, name, dk=None, dv=None, window=window)
    run(programs, name, dk=None, dv=None, window=window, first_head=1, heads=1, **{"pass": 11})
    run(programs, name, dk=dk.float(), dv=dk.float())
    text = "needs dk and dv, or the window alone"
    refused(programs, name, f"^window is None; {text}", dk=None, dv=None)
    refused(programs, name, f"^window is None; {text}", dv=None)
    refused(programs, name, f"^window is given; {text}", window=window)
    refused(programs, name, r"^window has \d+ bytes; needs", dk=None, dv=None, window=window[:-1])
    for first, heads in ((0, 3), (2, 1), (-1, 1), (0, 0)):
        text = rf"^heads is {heads} from {first} on; needs some of the 2 heads of k"
        refused(programs, name, text, first_head=first, heads=heads)
        text = rf"^heads is {heads} from {first} on; needs some of the 2 heads of dk"
        refused(programs, "gqa_rowmap_add", text, first_head=first, heads=heads)
    for number in (-1, 12):
        refused(programs, name, rf"^pass is {number}; needs 0 to 11", **{"pass": number})


@pytest.mark.parametrize("name", PROGRAMS)
def test_none_of_the_others_is_taken(programs: dict[str, Program], name: str) -> None:
    before = programs[name].launches()
    for operand in tensors(name).keys() - ({"dk", "dv"} if name == "gqa_bwd_dkv" else set()):
        with pytest.raises(TypeError, match="Tensor"):
            programs[name].run(*(calls()[name] | {operand: None}).values())
    assert programs[name].launches() == before


@pytest.mark.parametrize("name", ["gqa_fwd", "gqa_bwd_dkv", "gqa_bwd_dq"])
def test_more_or_less_than_the_kernels_count_is_refused(programs: dict[str, Program], name: str) -> None:
    q = calls()[name]["q"]
    for rows in (0, 2**31 - 256):
        text = rf"^q\.shape\[0\] is {rows}; needs 1 to 2147483391"
        refused(programs, name, text, q=OnFakeDevice(q, shape=(rows, HQ, 256)))
    for heads in (0, 65537):
        text = rf"^q\.shape\[1\] is {heads}; needs 1 to 65536"
        refused(programs, name, text, q=OnFakeDevice(q, shape=(TQ, heads, 256)))


def test_tiles_are_counted_in_32_bits(programs: dict[str, Program]) -> None:
    rows, heads = 2**31 - 257, 65536
    q = OnFakeDevice(calls()["gqa_fwd"]["q"], shape=(rows, heads, 256), strides=(256 * heads, 256, 1))
    k = OnFakeDevice(calls()["gqa_fwd"]["k"], shape=(TK, 1, 256))
    lse = OnFakeDevice(torch.zeros(1, 1), shape=(heads, rows), strides=(rows, 1))
    refused(programs, "gqa_fwd", "^the number of tiles is", q=q, k=k, v=k, out=q, lse=lse)
