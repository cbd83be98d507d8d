"""The bindings of the Hopper kernels: each operand that a kernel would misread is refused by name, before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cake_core.testing.cuda_on_cpu.emulation import OnFakeDevice, Program, randn
from gdn_emulation import int32
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
T, H, HV, N, CHUNKS = 3, 2, 4, 2, 2
Call = dict[str, Any]

ROWS = ("q", "k", "v", "do", "dq", "dk", "dv")
"""[T, heads, 128] in strides of whole vectors; all other rows are dense."""
STATES = ("entering", "leaving")
VECTORS = (*ROWS, "z", "o", "e", "E", "states", "adjoints")
"""What is read or written 16 bytes at a time."""
TABLES = ("chunks", "segments")
ANY = {"chunks": (0,), "segments": (0,), "entering": (0,), "leaving": (0,), "states": (0,), "adjoints": (0,)}
"""Dimensions of any size: what a table names is the caller's."""


def calls() -> dict[str, Call]:
    """Every operand of every program, dense."""

    def heads(n: int, seed: int) -> Tensor:
        return randn(T, n, 128, seed=seed)

    q, k, v, do = heads(H, 1), heads(H, 2), heads(HV, 3), heads(HV, 4)
    g, beta = -torch.rand(T, HV), torch.rand(T, HV).bfloat16()
    r_q, r_k = torch.ones(T, H), torch.ones(T, H)
    z = torch.zeros(T, HV, 64).bfloat16()
    e, E, o, dv = (torch.zeros(T, HV, 128).bfloat16() for _ in range(4))
    states, adjoints = (torch.zeros(CHUNKS, HV, 128, 128).bfloat16() for _ in range(2))
    entering, leaving = (torch.zeros(N, HV, 128, 128) for _ in range(2))
    chunks, segments = int32([(0, 2), (2, 1)], 2), int32([(0, 2, 0, 0, 0), (2, 1, 1, 1, 1)], 5)
    gates: Call = {"g": g, "beta": beta, "r_q": r_q, "r_k": r_k}
    prep: Call = {"z": z, "r_q": r_q, "r_k": r_k, "q": q, "k": k, "beta": beta, "chunks": chunks}
    walk: Call = {"segments": segments, "scale": 0.1}
    state: Call = {
        "o": o, "e": e, "states": states, "leaving": leaving, "q": q, "k": k, "v": v, **gates, "z": z,
        "entering": entering, **walk,
    }  # fmt: skip
    adjoint: Call = {
        "dv": dv, "E": E, "adjoints": adjoints, "entering": entering, "q": q, "k": k, "do": do, **gates, "z": z,
        "leaving": leaving, **walk,
    }  # fmt: skip
    tail: Call = {
        "dq": q.clone(), "dk": k.clone(), "dg": g.clone(), "dbeta": beta.clone(), "q": q, "k": k, "do": do, **gates,
        "e": e, "E": E, "states": states, "adjoints": adjoints, "chunks": chunks, "scale": 0.1,
    }  # fmt: skip
    return {"prep": prep, "state_scan": state, "adjoint_scan": adjoint, "tail": tail}


NAMES = tuple(calls())
HEADS = {"prep": "z", "state_scan": "v", "adjoint_scan": "do", "tail": "do"}
"""Which operand says how many value heads there are; q says how many tokens and key heads."""


def tensors(name: str) -> dict[str, Tensor]:
    return {operand: value for operand, value in calls()[name].items() if isinstance(value, Tensor)}


def run(programs: dict[str, Program], name: str, **change: Any) -> None:
    call = calls()[name]
    assert not change.keys() - call.keys()
    programs[f"gdn_{name}"].run(*(call | change).values())


def launches(programs: dict[str, Program]) -> int:
    return sum(program.launches() for program in programs.values())


def refused(programs: dict[str, Program], name: str, text: str, **change: Any) -> None:
    before = launches(programs)
    with pytest.raises(ValueError, match=text):
        run(programs, name, **change)
    assert launches(programs) == before, f"{name}: {change.keys()} launched"


@pytest.mark.parametrize("name", NAMES)
def test_the_call_that_the_others_change_is_served(programs: dict[str, Program], name: str) -> None:
    before = launches(programs)
    run(programs, name)
    assert launches(programs) == before + 1


@pytest.mark.parametrize("name", NAMES)
def test_each_operand_is_refused_on_another_device(programs: dict[str, Program], name: str) -> None:
    for operand, value in tensors(name).items():
        for where in ((2, 1), (1, 0)):
            text = rf"^{operand} is on device \({where[0]}, {where[1]}\); needs \(2, 0\), as the other operands"
            if operand == "q":  # it decides where the call runs
                text = r" is on device \(2, 0\); needs \(2, 1\)" if where[0] == 2 else "^q is on DLPack device type 1;"
            refused(programs, name, text, **{operand: OnFakeDevice(value, where)})


@pytest.mark.parametrize("name", NAMES)
def test_each_operand_is_refused_in_another_dtype_and_rank(programs: dict[str, Program], name: str) -> None:
    for operand, value in tensors(name).items():
        wanted = {"beta": "float32 or bfloat16", "dbeta": "float32 or bfloat16"}
        dtypes = {torch.float64, torch.float16, torch.int64, FP32, BF16, torch.int32} - {value.dtype}
        for dtype in dtypes:
            if operand in wanted and dtype == FP32:
                run(programs, name, **{operand: value.float()})
                continue
            text = wanted.get(operand, {BF16: "bfloat16", FP32: "float32"}.get(value.dtype, "int32"))
            got = str(dtype).removeprefix("torch.")
            refused(programs, name, rf"^{operand} is {got}; needs {text}", **{operand: value.to(dtype)})
        rank = value.dim()
        for other in (value[None, None], value[0]):
            text = rf"^{operand} has {other.dim()} dimensions; needs {rank}"
            refused(programs, name, text, **{operand: other})


BATCHED = (*ROWS, "g", "beta", "o", "dg", "dbeta")


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_have_a_batch_dimension(programs: dict[str, Program], name: str) -> None:
    """[1, T, ...] and [T, 1, ...] in any strides of tokens, [2, T / 2, ...] only where one stride walks all tokens."""
    rows = {operand: value for operand, value in tensors(name).items() if operand in BATCHED}
    before = launches(programs)
    run(programs, name, **{operand: value[None] for operand, value in rows.items()})
    run(programs, name, **{operand: value[:, None] for operand, value in rows.items()})
    assert launches(programs) == before + 2
    for operand, value in rows.items():
        apart = torch.zeros(T, 2, *value.shape[1:], dtype=value.dtype)[:, :1].expand(T, 2, *value.shape[1:])
        if operand not in ("q", HEADS[name], "dbeta", "dg", "o"):
            refused(programs, name, rf"^{operand}\.stride\(0\) is \d+; needs 0, the tokens", **{operand: apart})


@pytest.mark.parametrize("name", ["state_scan", "adjoint_scan", "tail"])
def test_scratch_may_be_raw_bytes(programs: dict[str, Program], name: str) -> None:
    """Of the size that the rows say, or more; a tail counts the chunks that there is room for."""
    raw = {o: t.flatten().view(torch.uint8) for o, t in tensors(name).items() if o in ("e", "E", "states", "adjoints")}
    before = launches(programs)
    run(programs, name, **raw)
    assert launches(programs) == before + 1
    for operand, value in raw.items():
        if operand in ("e", "E"):
            text = rf"^{operand} has {len(value) - 1} bytes; needs {len(value)}"
            refused(programs, name, text, **{operand: value[:-1]})
        elif name == "tail":
            text = rf"^chunks\.shape\[0\] is {CHUNKS}; needs at most .* {CHUNKS - 1} of {operand}"
            refused(programs, name, text, **{operand: value[:-1]})


@pytest.mark.parametrize("name", NAMES)
def test_each_operand_is_refused_in_another_size(programs: dict[str, Program], name: str) -> None:
    """One more and one less of every dimension; where an operand says the size, of another one by name."""
    for operand, value in tensors(name).items():
        for dim, size in enumerate(value.shape):
            if dim in ANY.get(operand, ()):
                continue
            more = torch.cat([value, value.narrow(dim, 0, 1)], dim).contiguous()
            for other in (more, value.narrow(dim, 0, size - 1).contiguous()):
                text = rf"^{operand}\.shape\[{dim}\] is {other.shape[dim]}; needs {size}"
                if (operand, dim) == ("q", 0):
                    text = rf"^k\.shape\[0\] is {T}; needs {other.shape[0]}"
                elif (operand, dim) == ("q", 1):
                    text = rf"^k\.shape\[1\] is {H}; needs 1|^{HEADS[name]}\.shape\[1\] is {HV}; needs a multiple of"
                elif (operand, dim) == (HEADS[name], 1):
                    text = rf"^{operand}\.shape\[1\] is {other.shape[1]}; needs a multiple of the {H} heads of q"
                refused(programs, name, text, **{operand: other})


@pytest.mark.parametrize("name", NAMES)
def test_each_operand_is_refused_with_elements_apart_and_between_vectors(
    programs: dict[str, Program], name: str
) -> None:
    for operand, value in tensors(name).items():
        apart = OnFakeDevice(value, strides=[2 * stride for stride in value.stride()])
        text = rf"^{operand} is not contiguous; needs dense row-major elements"
        if operand in ROWS:
            text = rf"^{operand}\.stride\(2\) is 2; needs 1"
        elif operand in STATES:
            text = rf"^{operand} is not dense; needs dense states, K or V first"
        if operand in ("g", "beta"):  # in any strides
            if name != "prep":
                run(programs, name, **{operand: torch.stack([value, value], -1)[..., 0]})
        else:
            refused(programs, name, text, **{operand: apart})
        if operand in VECTORS:
            raw = torch.zeros(value.numel() + 4, dtype=value.dtype)[4:].view(value.shape)
            refused(programs, name, rf"^{operand} starts 8 bytes past a multiple of 16", **{operand: raw})


@pytest.mark.parametrize("name", NAMES)
def test_strides_that_leave_the_vectors_are_refused(programs: dict[str, Program], name: str) -> None:
    for operand, value in tensors(name).items():
        if operand not in ROWS:
            continue
        for dim, (token, head) in enumerate(((value.stride(0) + 4, 128), (value.stride(0), 132))):
            odd = OnFakeDevice(value, strides=(token, head, 1))
            text = rf"^{operand}\.stride\({dim}\) is {(token, head)[dim]}; needs a multiple of 8, at least 0"
            refused(programs, name, text, **{operand: odd})
            back = [value.stride(0), 128, 1]
            back[dim] *= -1
            text = rf"^{operand}\.stride\({dim}\) is {back[dim]}; needs a multiple of 8, at least 0"
            refused(programs, name, text, **{operand: OnFakeDevice(value, strides=back)})


STATE = 128 * 128
BAD_STATES = {
    "documents apart": (HV * STATE + 128, STATE, 128, 1),
    "heads apart": (HV * STATE, STATE + 128, 128, 1),
    "heads before documents": (STATE, N * STATE, 128, 1),
    "rows apart": (HV * STATE, STATE, 256, 1),
    "columns apart": (HV * STATE, STATE, 1, 256),
    "one row": (HV * STATE, STATE, 0, 1),
}


@pytest.mark.parametrize("strides", BAD_STATES.values(), ids=BAD_STATES)
@pytest.mark.parametrize("name", ["state_scan", "adjoint_scan"])
def test_states_are_dense_in_either_layout(programs: dict[str, Program], name: str, strides: tuple[int, ...]) -> None:
    for operand in STATES:
        value = calls()[name][operand]
        refused(programs, name, rf"^{operand} is not dense", **{operand: OnFakeDevice(value, strides=strides)})
        run(programs, name, **{operand: value.mT})


@pytest.mark.parametrize("name", NAMES)
def test_a_dimension_of_one_has_any_stride(programs: dict[str, Program], name: str) -> None:
    one = {operand: t[:, :1].contiguous() for operand, t in tensors(name).items() if operand not in TABLES}
    for operand, value in one.items():
        strides = list(value.stride())
        strides[1] = 999
        if operand in (*ROWS, *STATES, "g", "beta"):
            run(programs, name, **one | {operand: OnFakeDevice(value, strides=strides)})


def test_none_stands_for_what_is_not_wanted(programs: dict[str, Program]) -> None:
    """Outputs, tapes, norms and states; never half of a pair."""
    before = launches(programs)
    nobody = int32([(0, 2, 0, -1, -1), (2, 1, 1, -1, -1)], 5)
    run(programs, "prep", r_q=None, r_k=None)
    run(programs, "state_scan", o=None, r_q=None, r_k=None)
    run(programs, "state_scan", e=None, states=None)
    for name in ("state_scan", "adjoint_scan"):
        run(programs, name, entering=None, leaving=None, segments=nobody)
        run(programs, name, entering=None, leaving=None)  # rows of no states: zeros, and nobody's
    run(programs, "adjoint_scan", r_q=None, r_k=None)
    run(programs, "tail", r_q=None, r_k=None)
    assert launches(programs) == before + 9
    for name in NAMES:
        refused(programs, name, "^r_k is None; needs both r_q and r_k or none", r_k=None)
        refused(programs, name, "^r_k is given; needs both r_q and r_k or none", r_q=None)
    text = "needs e and states, or neither and o"
    refused(programs, "state_scan", f"^e is None; {text}", e=None)
    refused(programs, "state_scan", f"^e is given; {text}", states=None)
    refused(programs, "state_scan", f"^e is None; {text}", o=None, e=None, states=None)


OPTIONAL = {"prep": {"r_q", "r_k"}, "tail": {"r_q", "r_k"}, "adjoint_scan": {"r_q", "r_k", *STATES}}
OPTIONAL["state_scan"] = {"r_q", "r_k", *STATES, "o", "e", "states"}


@pytest.mark.parametrize("name", NAMES)
def test_none_of_the_others_is_taken(programs: dict[str, Program], name: str) -> None:
    before = launches(programs)
    for operand in tensors(name).keys() - OPTIONAL[name]:
        with pytest.raises(TypeError, match="Tensor"):
            run(programs, name, **{operand: None})
    assert launches(programs) == before


def many_heads(n: int) -> OnFakeDevice:
    """[T, n, 128] by its word."""
    return OnFakeDevice(randn(1, 1, 128, seed=1), shape=(T, n, 128), strides=(n * 128, 128, 1))


@pytest.mark.parametrize("name", NAMES)
def test_more_than_the_kernels_count_is_refused(programs: dict[str, Program], name: str) -> None:
    q, heads = calls()[name]["q"], HEADS[name]
    long = OnFakeDevice(q, shape=(2**31 - 64, H, 128))
    refused(programs, name, r"^q\.shape\[0\] is 2147483584; needs at most 2147483583", q=long)
    refused(programs, name, rf"^{heads}\.shape\[1\] is 65538; .*at most 2\^16", **{heads: many_heads(65538)})
    refused(programs, name, rf"^{heads}\.shape\[1\] is 0; needs a multiple", **{heads: many_heads(0)})
    refused(programs, name, rf"^{heads}\.shape\[1\] is {HV}; needs a multiple of the 0 heads of q", q=many_heads(0))
    table, columns, each = ("segments", 5, 2 * HV) if "scan" in name else ("chunks", 2, H)
    most = (2**31 - 1) // each
    entries = OnFakeDevice(calls()[name][table], shape=(most + 1, columns))
    refused(programs, name, rf"^{table}\.shape\[0\] is {most + 1}; needs at most {most}", **{table: entries})


def test_the_tail_wants_states_of_every_chunk(programs: dict[str, Program]) -> None:
    for operand in ("states", "adjoints"):
        one = calls()["tail"][operand][:1]
        refused(programs, "tail", r"^chunks\.shape\[0\] is 2; needs at most the", **{operand: one})


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_and_no_entries_launch_nothing(programs: dict[str, Program], name: str) -> None:
    before = launches(programs)
    table = "segments" if "scan" in name else "chunks"
    run(programs, name, **{table: calls()[name][table][:0]})
    rows = tensors(name).keys() - {table, *STATES, "states", "adjoints"}
    run(programs, name, **{operand: calls()[name][operand][:0].clone() for operand in rows})
    assert launches(programs) == before
