"""The key bound and the boundaries of segments: what is checked on the host, and when it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core import config, device
from cake_core.testing.fake_cuda import FakeCuda, recorded_launches
from cake_core.testing.gates import assert_operands_untouched
from cake_gqa import varlen_gqa_attention, varlen_gqa_attention_bwd, varlen_gqa_attention_fwd
from cake_gqa.testing import steps
from torch import Tensor

LENGTHS = ((70, 70), (0, 5), (30, 90), (9, 4))
I32 = torch.int32
Call = Callable[..., Any]


def attend(step: steps.Step, **options: Any) -> Any:
    return varlen_gqa_attention(step.q, step.k, step.v, step.cu_q, step.cu_k, **{"max_seqlen_k": step.bound, **options})


def forward(step: steps.Step, **options: Any) -> Any:
    given = {"max_seqlen_k": step.bound, **options}
    return varlen_gqa_attention_fwd(step.q, step.k, step.v, step.cu_q, step.cu_k, **given)


def backward(step: steps.Step, **options: Any) -> Any:
    out, lse = torch.zeros_like(step.q), torch.zeros(step.q.shape[1::-1], device=step.q.device)
    given = {"max_seqlen_k": step.bound, **options}
    operands = step.q, step.k, step.v, out, lse, step.dout, step.cu_q, step.cu_k
    return varlen_gqa_attention_bwd(*operands, **given)


ENTRIES = {"varlen_gqa_attention": attend, "varlen_gqa_attention_fwd": forward, "varlen_gqa_attention_bwd": backward}
entries = pytest.mark.parametrize("entry", ENTRIES)


# --- the key bound ----------------------------------------------------------------------------------------------


def test_the_key_bound_has_to_be_given() -> None:
    """By keyword: a sixth positional argument is no bound."""
    step = steps.make_step(LENGTHS, (4, 2))
    operands: tuple[Any, ...] = step.q, step.k, step.v, step.cu_q, step.cu_k
    with pytest.raises(TypeError, match="max_seqlen_k"):
        varlen_gqa_attention(*operands)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="max_seqlen_k"):
        varlen_gqa_attention_bwd(*operands[:3], step.q, step.q, step.q, *operands[3:])  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="positional"):
        varlen_gqa_attention(*operands, 90)  # pyright: ignore[reportCallIssue]


@entries
@pytest.mark.parametrize("value", [True, 90.0, "90", torch.tensor(90), torch.tensor([90])], ids=repr)
def test_the_key_bound_is_a_host_int(entry: str, value: object) -> None:
    """A tensor would be read at every call, and recompile a compiled one."""
    step = steps.make_step(LENGTHS, (4, 2))
    with pytest.raises(TypeError, match=rf"{entry}: max_seqlen_k.*host int"):
        ENTRIES[entry](step, max_seqlen_k=value)


@entries
def test_a_negative_key_bound_is_refused(entry: str) -> None:
    step = steps.make_step(LENGTHS, (4, 2))
    with pytest.raises(ValueError, match=rf"{entry}: max_seqlen_k is -1"):
        ENTRIES[entry](step, max_seqlen_k=-1)


@entries
@pytest.mark.parametrize("check", [None, False, True])
@pytest.mark.parametrize("bound", [0, 1, 69, 89])
def test_a_bound_below_the_longest_segment_is_refused(bound: int, check: bool | None, entry: str) -> None:
    """On the CPU the check is free and always runs: index and length of a segment and the bound are named."""
    step = steps.make_step(LENGTHS, (4, 2))
    first, length = next((n, nk) for n, (_, nk) in enumerate(LENGTHS) if nk > bound)
    with pytest.raises(ValueError, match=rf"{entry}: .*max_seqlen_k.*") as raised:
        ENTRIES[entry](step, max_seqlen_k=bound, check_seqlens=check)
    text = str(raised.value)
    assert str(bound) in text
    assert any(f"{nk}" in text and f"{n}" in text for n, (_, nk) in enumerate(LENGTHS) if nk > bound), (first, length)


@entries
@pytest.mark.parametrize("bound", [90, 91, 169, 10**6, 2**31])
def test_the_longest_segment_and_anything_above_is_accepted(bound: int, entry: str) -> None:
    ENTRIES[entry](steps.make_step(LENGTHS, (4, 2)), max_seqlen_k=bound, check_seqlens=True)


def test_a_forward_alone_needs_no_bound() -> None:
    step = steps.make_step(LENGTHS, (4, 2))
    operands = step.q, step.k, step.v, step.cu_q, step.cu_k
    out, _ = varlen_gqa_attention_fwd(*operands)
    assert torch.equal(out, varlen_gqa_attention_fwd(*operands, max_seqlen_k=90, check_seqlens=True)[0])


@pytest.mark.parametrize("bound", [0, 3])
def test_a_bound_of_nothing(bound: int) -> None:
    attend(steps.make_step(((4, 0), (0, 0)), (4, 2)), max_seqlen_k=bound)


# --- boundaries -------------------------------------------------------------------------------------------------


def malformed() -> dict[str, tuple[str, str, Any]]:
    """What is wrong -> the argument, a pattern of what the message says, and the boundaries in its place."""
    return {
        "begins late, q": ("cu_seqlens_q", r"1", torch.tensor([1, 70, 70, 100, 109], dtype=I32)),
        "begins late, k": ("cu_seqlens_k", r"2", torch.tensor([2, 70, 75, 165, 169], dtype=I32)),
        "begins below, k": ("cu_seqlens_k", r"-1", torch.tensor([-1, 70, 75, 165, 169], dtype=I32)),
        "decreases, q": ("cu_seqlens_q", r"70", torch.tensor([0, 70, 60, 100, 109], dtype=I32)),
        "decreases, k": ("cu_seqlens_k", r"60", torch.tensor([0, 70, 60, 165, 169], dtype=I32)),
        "ends early, q": ("cu_seqlens_q", r"108", torch.tensor([0, 70, 70, 100, 108], dtype=I32)),
        "ends late, k": ("cu_seqlens_k", r"170", torch.tensor([0, 70, 75, 165, 170], dtype=I32)),
        "int64, q": ("cu_seqlens_q", r"int64", torch.tensor([0, 70, 70, 100, 109])),
        "int16, k": ("cu_seqlens_k", r"int16", torch.tensor([0, 70, 75, 165, 169], dtype=torch.int16)),
        "float, q": ("cu_seqlens_q", r"float32", torch.tensor([0.0, 70, 70, 100, 109])),
        "two dimensions, q": ("cu_seqlens_q", r"\(1, 5\)", torch.tensor([[0, 70, 70, 100, 109]], dtype=I32)),
        "strided, k": ("cu_seqlens_k", r"", torch.tensor([0, 9, 70, 9, 75, 9, 165, 9, 169, 9], dtype=I32)[::2]),
        "one entry, q": ("cu_seqlens_q", r"", torch.tensor([0], dtype=I32)),
        "no entry, k": ("cu_seqlens_k", r"", torch.tensor([], dtype=I32)),
        "fewer segments, k": ("cu_seqlens_k", r"4|5", torch.tensor([0, 70, 165, 169], dtype=I32)),
        "a list, q": ("cu_seqlens_q", r"list", [0, 70, 70, 100, 109]),
        "nothing, k": ("cu_seqlens_k", r"None", None),
    }


@entries
@pytest.mark.parametrize("name", malformed())
def test_malformed_boundaries_are_refused_by_name(name: str, entry: str) -> None:
    """On the CPU also what only the check would see on a device. Nothing is written."""
    argument, pattern, given = malformed()[name]
    step = steps.make_step(LENGTHS, (4, 2))
    error = TypeError if not isinstance(given, Tensor) else ValueError
    wrong = replace(step, **{"cu_q" if argument == "cu_seqlens_q" else "cu_k": given})
    into: dict[str, Any] = {}
    if entry == "varlen_gqa_attention_fwd":
        into = {"out": torch.ones_like(step.q), "lse": torch.ones(4, 109)}
    if entry == "varlen_gqa_attention_bwd":
        into = {"dq": torch.ones_like(step.q), "dk": torch.ones_like(step.k), "dv": torch.ones_like(step.k)}
    with assert_operands_untouched(into), pytest.raises(error, match=rf"{entry}: .*{argument}.*({pattern})"):
        ENTRIES[entry](wrong, **into)


def test_a_row_map_out_of_range_is_refused() -> None:
    """Always on the CPU: tensor, index, value and bound are named, and the destinations keep their bits."""
    step = steps.make_step(LENGTHS, (4, 2), form="add")
    assert step.row_map is not None
    assert step.start is not None
    saved = step.forward()
    rows = step.start[0].shape[0]
    for value in (rows, -1, 2**31 - 1, -(2**31)):
        bad = step.row_map.clone()
        bad[77] = value
        wrong = replace(step, row_map=bad)
        into = step.destinations() | {"row_map": bad}
        with assert_operands_untouched(into), pytest.raises(ValueError, match=rf"row_map.*77.*{value}|{value}.*77"):
            wrong.backward(saved, **into)
    last = step.row_map.clone()
    last[77] = rows - 1
    replace(step, row_map=last).run()


# --- on a device ------------------------------------------------------------------------------------------------


def on_device(step: steps.Step, fake: FakeCuda) -> steps.Step:
    fields = ("q", "k", "v", "dout", "cu_q", "cu_k")
    return replace(step, **{name: fake.cuda(getattr(step, name)) for name in fields})


def configured(how: str) -> dict[str, Any]:
    """Arguments of a call that checks: by argument, or by the option."""
    config.configure(cake_gqa_check_seqlens=how == "option")
    return {"check_seqlens": True} if how == "argument" else {}


WRONG: dict[str, Callable[[steps.Step], steps.Step]] = {
    "bound": lambda step: replace(step, bound=89),
    "decreasing": lambda step: replace(step, cu_k=torch.tensor([0, 70, 60, 165, 169], dtype=I32)),
    "end": lambda step: replace(step, cu_q=torch.tensor([0, 70, 70, 100, 108], dtype=I32)),
}


@entries
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("how", ["argument", "option"])
def test_the_check_runs_before_any_launch(how: str, wrong: str, entry: str) -> None:
    step = WRONG[wrong](steps.make_step(LENGTHS, (4, 2)))
    with FakeCuda(devices=1) as fake, recorded_launches() as launches:
        given = configured(how)
        with pytest.raises(ValueError, match=rf"{entry}: .*(max_seqlen_k|cu_seqlens)"):
            ENTRIES[entry](on_device(step, fake), **given)
        assert not launches


@entries
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_without_the_check_nothing_is_read(wrong: str | None, entry: str) -> None:
    """Whatever the boundaries hold, a call launches; nothing on the device is read on the host."""
    step = steps.make_step(LENGTHS, (4, 2))
    step = step if wrong is None else WRONG[wrong](step)
    with FakeCuda(devices=1) as fake, recorded_launches() as launches:
        moved = on_device(step, fake)
        with device.synchronize_forbidden():
            ENTRIES[entry](moved)
        assert launches
        config.configure(cake_gqa_check_seqlens=True)
        with device.synchronize_forbidden():
            ENTRIES[entry](moved, check_seqlens=False)  # the argument overrules the option


@entries
def test_the_check_is_refused_while_a_graph_is_captured(entry: str) -> None:
    """It would synchronize."""
    step = steps.make_step(LENGTHS, (4, 2))
    with FakeCuda(devices=1) as fake, recorded_launches() as launches:
        moved = on_device(step, fake)
        with fake.capture(0), pytest.raises(RuntimeError, match=rf"{entry}: .*check_seqlens.*synchroni"):
            ENTRIES[entry](moved, check_seqlens=True)
        assert not launches
