"""Outputs that the caller gives: marked as written, refused over an operand, filled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cake_core.testing.fake_cuda import FakeCuda, recorded_launches
from cake_core.testing.gates import assert_same_bits
from cake_gqa import varlen_gqa_attention_bwd, varlen_gqa_attention_fwd
from cake_gqa.testing import steps
from torch import Tensor

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LENGTHS = ((3, 5), (4, 2))


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """A Hopper device whose kernels write nothing: what marks a tensor as written is the op itself."""
    with FakeCuda(capability=(9, 0)) as device, recorded_launches():
        yield device


def versions(*tensors: Tensor) -> list[int]:
    return [t._version for t in tensors]


def test_a_forward_marks_given_outputs_as_written(fake: FakeCuda) -> None:
    step = steps.make_step(LENGTHS, (4, 2)).to("cuda")
    out, lse = fake.cuda(torch.empty(7, 4, 256, dtype=BF16)), fake.cuda(torch.empty(4, 7))
    before = versions(out, lse)
    step.forward(out=out, lse=lse)
    assert [a - b for a, b in zip(versions(out, lse), before, strict=True)] == [1, 1]


def test_a_backward_marks_given_outputs_as_written(fake: FakeCuda) -> None:
    step = steps.make_step(LENGTHS, (4, 2)).to("cuda")
    saved = step.forward()
    given = [fake.cuda(torch.empty(7, heads, 256, dtype=BF16)) for heads in (4, 2, 2)]
    before = versions(*given)
    step.backward(saved, **dict(zip(("dq", "dk", "dv"), given, strict=True)))
    assert [a - b for a, b in zip(versions(*given), before, strict=True)] == [1, 1, 1]


def test_destinations_of_a_source_are_marked_as_written(fake: FakeCuda) -> None:
    step = steps.make_step(LENGTHS, (4, 2), form="window").to("cuda")
    windows = fake.cuda(torch.empty(7, 2, 256)), fake.cuda(torch.empty(7, 2, 256))
    before = versions(*windows)
    leaves = step.leaves()
    out, _ = step.attend(leaves, dkv_acc=lambda: windows)
    out.backward(step.dout)
    assert [a - b for a, b in zip(versions(*windows), before, strict=True)] == [1, 1]


def memory(*shapes: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """Tensors that all begin at one address."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
    raw = torch.zeros(max(sizes) + 64, dtype=torch.uint8)
    return [raw[:size].view(dtype).view(shape) for size, (shape, dtype) in zip(sizes, shapes, strict=True)]


def operands(dtype: torch.dtype = F32) -> dict[str, Any]:
    step = steps.make_step(LENGTHS, (4, 2), dtype=str(dtype).removeprefix("torch."))
    return step.passed() | {"row_map": torch.tensor([0, 1, 2, 3, 4, 3, 4], dtype=torch.int32)}


ALL = ("q", "k", "v", "out", "lse", "dout", "cu_seqlens_q", "cu_seqlens_k", "row_map")


@pytest.mark.parametrize("name", ALL)
def test_no_output_of_a_backward_may_lie_over_an_operand(name: str) -> None:
    given = operands()
    shape = (7, 2, 256) if name != "row_map" else (5, 2, 256)
    target, given[name] = memory((shape, F32), (tuple(given[name].shape), given[name].dtype))
    if name in ("cu_seqlens_q", "cu_seqlens_k", "row_map"):
        given[name].copy_(operands()[name])
    row_map = given.pop("row_map")
    into: dict[str, Any] = {"dk": target, "dkv_dtype": F32}
    if name == "row_map":
        into = {"dk_acc": target, "dv_acc": torch.zeros(shape), "row_map": row_map}
    with pytest.raises(ValueError, match=f"dk(_acc)? is overlapping {name}"):
        varlen_gqa_attention_bwd(**given, max_seqlen_k=5, **into)


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"])
def test_no_output_of_a_forward_may_lie_over_an_operand(name: str) -> None:
    given = {key: value for key, value in operands().items() if key in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")}
    target, over = memory(((7, 4, 256), F32), (tuple(given[name].shape), given[name].dtype))
    given[name] = over.copy_(given[name])
    with pytest.raises(ValueError, match=f"out is overlapping {name}"):
        varlen_gqa_attention_fwd(**given, out=target)


def test_given_results_of_fp64_are_filled() -> None:
    given = operands(F64)
    forward = [given[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    out, lse = torch.empty(7, 4, 256, dtype=F64), torch.empty(4, 7, dtype=F64)
    varlen_gqa_attention_fwd(*forward, out=out, lse=lse)
    assert_same_bits(out, given["out"], "out")
    assert_same_bits(lse, given["lse"], "lse")
    with pytest.raises(ValueError, match=r"lse is torch\.float32; needs torch\.float64"):
        varlen_gqa_attention_fwd(*forward, lse=torch.empty(4, 7))
