"""The bindings of the three libraries: each operand that a kernel would misread is refused by name, before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cake_core.testing.cuda_on_cpu.emulation import OnFakeDevice, Program, randn
from conv_emulation import int32
from torch import Tensor

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
TOKENS, CHANNELS, COUNT, HALO = 40, 16, 3, 3
Call = dict[str, Any]


def _shared() -> Call:
    return {
        "x": randn(TOKENS, CHANNELS, seed=1),
        "weight": randn(CHANNELS, 4, seed=2),
        "cu_seqlens": int32((0, 10, 12, TOKENS)),
        "length": 0,
        "history_rows": randn(COUNT * HALO, CHANNELS, seed=3),
        "history_table": torch.zeros(COUNT, HALO, dtype=INT32),
    }


def _ordered(call: Call, *names: str) -> Call:
    return {name: call[name] for name in names}


def calls() -> dict[str, Call]:
    """Every operand of every program, dense; of the halo one call per edge."""
    shared = _shared()
    out = torch.empty(TOKENS, CHANNELS, dtype=BF16)
    states = torch.empty(COUNT * HALO, CHANNELS, dtype=BF16)
    table, skip = torch.zeros(COUNT, HALO, dtype=INT32), torch.full((COUNT, HALO), -1, dtype=INT32)
    fwd = shared | {"y": out, "skip": skip, "silu": 1}
    bwd = shared | {
        "dx": out.clone(), "dweight": torch.empty(CHANNELS, 4), "partial": torch.empty(2, 4 * CHANNELS),
        "dy": randn(TOKENS, CHANNELS, seed=4), "d_final": states.clone().zero_(), "skip": skip, "silu": 1,
        "round_preactivation": 1, "blocks": 4, "partial_rows": 2,
    }  # fmt: skip
    halo = shared | {"silu": 1, "round_preactivation": 1, "dy": bwd["dy"], "rows": None, "table": None}
    rows = torch.zeros(COUNT * HALO, CHANNELS)
    slots = torch.full((COUNT, HALO, HALO), -1, dtype=INT32)
    given: dict[str, Call] = {
        "gather": {"edge": 0, "out": out[:5].clone(), "table": torch.arange(5), "weight": None, "dy": None},
        "head forward": {"edge": 1, "out": out.clone(), "dy": None},
        "head gradient": {"edge": 2, "out": torch.empty(COUNT * HALO, CHANNELS), "table": slots},
        "tail gradient": {"edge": 3, "out": out.clone(), "rows": rows, "table": table},
        "final state": {"edge": 4, "out": states.clone(), "weight": None, "dy": None},
        "initial gradient": {"edge": 5, "out": states.clone(), "rows": states.clone().zero_()},
    }
    given["gather"] |= {"cu_seqlens": None, "history_rows": None, "history_table": None}
    fwd_order = ("y", "x", "weight", "cu_seqlens", "length", "history_rows", "history_table", "skip", "silu")
    bwd_order = (
        "dx", "dweight", "partial", "dy", "x", "weight", "cu_seqlens", "length", "history_rows", "history_table",
        "d_final", "skip", "silu", "round_preactivation", "blocks", "partial_rows",
    )  # fmt: skip
    halo_order = (
        "edge", "out", "x", "weight", "dy", "rows", "table", "cu_seqlens", "length", "history_rows", "history_table",
        "silu", "round_preactivation",
    )  # fmt: skip
    return {
        "fwd": _ordered(fwd, *fwd_order),
        "bwd": _ordered(bwd, *bwd_order),
        **{f"halo {name}": _ordered(halo | edge, *halo_order) for name, edge in given.items()},
    }


def run(programs: dict[str, Program], name: str, **change: Any) -> None:
    programs[f"conv1d_{name.split()[0]}"].run(*(calls()[name] | change).values())


def launches(programs: dict[str, Program]) -> list[int]:
    return [program.launches() for program in programs.values()]


@pytest.mark.parametrize("name", calls())
def test_the_call_that_the_others_change_is_served(programs: dict[str, Program], name: str) -> None:
    before = sum(launches(programs))
    run(programs, name)
    assert sum(launches(programs)) - before == (2 if name == "bwd" else 1)


def _address(name: str) -> int:
    """Bytes that the operand's address is a multiple of, where a kernel wants vectors of it."""
    return 0 if name in ("cu_seqlens", "history_table", "skip", "table", "dweight") else 16


@pytest.mark.parametrize("name", calls())
def test_each_operand_is_refused_on_another_device_and_with_elements_apart(
    programs: dict[str, Program], name: str
) -> None:
    """Also at an address between two vectors; nothing is launched."""
    call, before = calls()[name], launches(programs)
    for operand, value in call.items():
        if not isinstance(value, Tensor):
            continue
        if operand != "x":  # x decides where the call runs
            with pytest.raises(ValueError, match=rf"{operand} is on device \(2, 1\)"):
                run(programs, name, **{operand: OnFakeDevice(value, (2, 1))})
        else:
            with pytest.raises(ValueError, match=r" is on device \(2, 0\); needs \(2, 1\)"):
                run(programs, name, x=OnFakeDevice(value, (2, 1)))
            with pytest.raises(ValueError, match="x is on DLPack device type 1; needs a CUDA tensor"):
                run(programs, name, x=OnFakeDevice(value, (1, 0)))
        apart = OnFakeDevice(value, strides=[2 * stride for stride in value.stride()])
        with pytest.raises(ValueError, match=rf"{operand}(\.stride\(\d\) is 2; needs 1| is not contiguous)"):
            run(programs, name, **{operand: apart})
        if _address(operand):
            raw = torch.zeros(value.numel() + 2, dtype=value.dtype)[2:].view(value.shape)
            with pytest.raises(ValueError, match=rf"{operand} starts \d bytes past"):
                run(programs, name, **{operand: raw})
    assert launches(programs) == before


@pytest.mark.parametrize("name", calls())
def test_each_operand_is_refused_in_another_dtype_rank_and_size(programs: dict[str, Program], name: str) -> None:
    call, before = calls()[name], launches(programs)
    for operand, value in call.items():
        if not isinstance(value, Tensor) or operand == "partial":  # of scratch the bytes count alone; below
            continue
        with pytest.raises(ValueError, match=rf"{operand} is float64; needs"):
            run(programs, name, **{operand: value.double()})
        if operand not in ("history_table", "skip", "table") or name == "halo gather":
            with pytest.raises(ValueError, match=rf"{operand} has \d dimensions; needs \d"):
                run(programs, name, **{operand: value[None]})
        if operand in ("x", "weight", "cu_seqlens", "out", "history_rows") or (operand, name) == (
            "rows",
            "halo tail gradient",
        ):
            continue  # sizes that say what the call is, or any number of rows behind a table; below
        more = torch.cat((value, value[:1]))
        with pytest.raises(ValueError, match=rf"{operand}(\.shape\[0\] is \d+; needs \d+| has \d+ entries; needs \d+)"):
            run(programs, name, **{operand: more})
    assert launches(programs) == before


X = randn(TOKENS, CHANNELS, seed=1)
NO_HISTORY: Call = {"history_rows": None, "history_table": None}
BAD: list[tuple[str, Call, str]] = [
    ("fwd", {"x": randn(TOKENS, 12, seed=1)}, r"x.shape\[1\] is 12; needs a multiple of 8 from 8"),
    ("fwd", {"x": randn(TOKENS, 0, seed=1)}, r"x.shape\[1\] is 0; needs a multiple of 8 from 8"),
    ("fwd", {"x": randn(TOKENS, 20, seed=1)[:, :16]}, r"x.stride\(0\) is 20; needs a multiple of 8"),
    ("fwd", {"x": OnFakeDevice(X, strides=(-16, 1))}, r"x.stride\(0\) is -16"),
    ("fwd", {"x": OnFakeDevice(X, strides=(2**31, 1))}, r"x.stride\(0\) is 2147483648; needs at most"),
    ("fwd", {"x": OnFakeDevice(X, shape=(2**31 - 64, 16))}, r"x.shape\[0\] is 2147483584; needs at most 2147483583"),
    ("fwd", {"weight": randn(24, 4, seed=1)}, r"weight.shape\[0\] is 24; needs 16"),
    ("fwd", {"weight": randn(16, 1, seed=1)}, r"weight.shape\[1\] is 1; needs 2, 3 or 4"),
    ("fwd", {"weight": randn(16, 5, seed=1)}, r"weight.shape\[1\] is 5; needs 2, 3 or 4"),
    ("fwd", {"weight": randn(16, 3, seed=1)}, r"history_table has 9 entries; needs 6"),
    ("fwd", {"y": torch.zeros(TOKENS, 24).bfloat16()}, r"y.shape\[1\] is 24; needs 16"),
    ("fwd", {"y": torch.zeros(TOKENS, 20).bfloat16()[:, :16]}, r"y.stride\(0\) is 20"),
    ("fwd", {"cu_seqlens": int32((0,))}, r"cu_seqlens.shape\[0\] is 1; needs 2 to"),
    ("fwd", {"cu_seqlens": torch.tensor((0, 10, 12, TOKENS))}, "cu_seqlens is int64; needs int32"),
    ("fwd", {"cu_seqlens": None, "length": 0}, "length is 0; needs a divisor of the 40 tokens"),
    ("fwd", {"cu_seqlens": None, "length": 7}, "length is 7; needs a divisor of the 40 tokens"),
    ("fwd", {"cu_seqlens": None, "length": 20}, "history_table has 9 entries; needs 6"),
    ("fwd", {"history_rows": torch.zeros(9, 24)}, r"history_rows.shape\[1\] is 24; needs 16"),
    ("fwd", {"history_table": None, "history_rows": torch.zeros(8, 16)}, r"history_rows.shape\[0\] is 8; needs 9"),
    ("bwd", {"dweight": torch.zeros(16, 3)}, r"dweight.shape\[1\] is 3; needs the taps of weight"),
    ("bwd", {"dweight": torch.zeros(16, 4).half()}, "dweight is float16; needs float32 or bfloat16"),
    ("bwd", {"partial": None}, "partial is None; needs scratch of 2 x 256 bytes"),
    ("bwd", {"partial": torch.zeros(2, 63)}, "partial has 504 bytes; needs 2 x 256"),
    ("bwd", {"partial": torch.zeros(64, 2).t()}, "partial is not contiguous"),
    ("bwd", {"partial": torch.zeros(513, dtype=torch.uint8)[1:]}, "partial starts 1 bytes past a multiple of 16"),
    ("bwd", {"partial_rows": 0}, "partial_rows is 0; needs 1 to"),
    ("bwd", {"partial_rows": 2**31}, "partial_rows is 2147483648; needs 1 to"),
    ("bwd", {"blocks": 3}, "blocks is 3; needs a multiple of partial_rows 2 of at most 10"),
    ("bwd", {"blocks": 0}, "blocks is 0; needs a multiple"),
    ("bwd", {"blocks": 12}, "blocks is 12; needs a multiple of partial_rows 2 of at most 10"),
    ("bwd", {"d_final": torch.zeros(8, 16)}, r"d_final.shape\[0\] is 8; needs 9"),
    ("halo gather", {"edge": -1}, "edge is -1; needs 0 to 5"),
    ("halo gather", {"edge": 6}, "edge is 6; needs 0 to 5"),
    ("halo gather", {"table": None}, "table is None; needs a tensor for this edge"),
    ("halo gather", {"table": torch.arange(5, dtype=INT32)}, "table is int32; needs int64"),
    ("halo gather", {"table": torch.arange(6)}, r"table.shape\[0\] is 6; needs 5"),
    ("halo gather", {"out": torch.zeros(5, 16)}, "out is float32; needs bfloat16"),
    ("halo head forward", {"weight": None}, "weight is None; needs a tensor for this edge"),
    ("halo head forward", {"out": torch.zeros(TOKENS - 1, 16).bfloat16()}, r"out.shape\[0\] is 39; needs 40"),
    ("halo head gradient", {"out": torch.zeros(9, 16).bfloat16()}, "out is bfloat16; needs float32"),
    ("halo head gradient", {"dy": None}, "dy is None; needs a tensor for this edge"),
    ("halo head gradient", {"table": None}, "table is None; needs a tensor for this edge"),
    ("halo tail gradient", {"rows": None}, "rows is None; needs a tensor for this edge"),
    ("halo tail gradient", {"rows": torch.zeros(9, 16).bfloat16()}, "rows is bfloat16; needs float32"),
    ("halo tail gradient", {"rows": torch.zeros(9, 24)}, r"rows.shape\[1\] is 24; needs 16"),
    ("halo final state", {"out": torch.zeros(2, 16)}, r"out.shape\[0\] is 2; needs 1, 2 or 3 rows for each of 3"),
    ("halo final state", {"out": torch.zeros(12, 16)}, r"out.shape\[0\] is 12; needs 1, 2 or 3 rows for each of 3"),
    ("halo final state", {"out": torch.zeros(8, 16)}, "history_table has 9 entries; needs 6"),
    ("halo final state", {"out": torch.zeros(8, 16), "history_table": None}, r"history_rows.shape\[0\] is 9; needs 6"),
    ("halo final state", {"out": torch.zeros(8, 16), **NO_HISTORY}, r"out.shape\[0\] is 8; needs 6"),
    ("halo initial gradient", {"rows": torch.zeros(8, 16)}, r"rows.shape\[0\] is 8; needs 9"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "text"), BAD, ids=[f"{name}-{text}" for name, _, text in BAD])
def test_a_binding_says_what_it_refuses(programs: dict[str, Program], name: str, change: Call, text: str) -> None:
    before = launches(programs)
    with pytest.raises(ValueError, match=text):
        run(programs, name, **change)
    assert launches(programs) == before


def test_no_tokens_and_no_rows_launch_nothing(programs: dict[str, Program]) -> None:
    before = launches(programs)
    nothing = torch.empty(0, CHANNELS, dtype=BF16)
    run(programs, "fwd", x=nothing, y=nothing)
    run(programs, "bwd", x=nothing, dy=nothing, dx=nothing)
    run(programs, "bwd", dx=None, dweight=None, partial=None)
    run(programs, "halo gather", out=nothing, table=torch.empty(0, dtype=torch.int64))
    run(programs, "halo head gradient", out=torch.empty(0, CHANNELS))
    assert launches(programs) == before
