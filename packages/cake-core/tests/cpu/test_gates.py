"""The gates refuse what they are for, and say where."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from cake_core.testing.gates import (
    assert_guards,
    assert_operands_untouched,
    assert_rel_rms,
    assert_same_bits,
    fresh_process,
    poisoned_empty,
    rel_rms_limit,
)
from torch import Tensor

WANT = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def test_the_error_is_returned() -> None:
    got = WANT * (1 + 1e-3)
    assert assert_rel_rms(got, WANT, 2e-3, "y") == pytest.approx(1e-3, rel=1e-6)
    assert assert_rel_rms(WANT.bfloat16(), WANT, 4e-3, "y") < 2e-3


@pytest.mark.parametrize("scale", [1.02, 1 / 1.02, 1.1, -1.0])
def test_a_scaled_output_is_refused(scale: float) -> None:
    with pytest.raises(AssertionError, match=r"^y: relative RMS error .* is over the budget"):
        assert_rel_rms(WANT * scale, WANT, 1e-2, "y")


@pytest.mark.parametrize("short", [0.985, 1.015])
def test_a_budget_that_would_hide_two_per_cent_on_this_output_is_refused(short: float) -> None:
    """A budget of 1.8 % with an output that is 1.5 % off: scaling it by 1.02 the other way would pass."""
    assert assert_rel_rms(WANT * short, WANT, 1.8e-2, "y", detect_scale=None) < 1.8e-2
    with pytest.raises(AssertionError, match="would accept a scale"):
        assert_rel_rms(WANT * short, WANT, 1.8e-2, "y")


FEW = torch.tensor([1.0039, -2.0078, 0.5019, 4.0155], dtype=torch.float64)  # each lies near the middle of two BF16


def test_a_few_elements_may_have_the_error_of_their_own_rounding() -> None:
    """One correct rounding of these four is over the budget; anything worse is refused all the same."""
    rounded = FEW.bfloat16()
    error = assert_rel_rms(rounded, FEW, 1.8e-3, "y")
    assert error > 3.5e-3
    assert rel_rms_limit(FEW, torch.bfloat16, 1.8e-3) == pytest.approx(1.02 * error)
    assert rel_rms_limit(FEW, torch.float32, 1.8e-3) == 1.8e-3
    wrong = rounded.clone()
    wrong[3] = 3.984375  # the second nearest number below
    for got in (rounded * 1.02, rounded / 1.02, wrong, torch.full_like(rounded, torch.nan)):
        for scale in (1.02, None):
            with pytest.raises(AssertionError, match=r"over the budget 1\.800e-03"):
                assert_rel_rms(got, FEW, 1.8e-3, "y", detect_scale=scale)
    with pytest.raises(AssertionError, match=r"over the budget 1\.800e-03$"):
        assert_rel_rms(rounded.float(), FEW, 1.8e-3, "an FP32 output that was rounded to BF16")
    with pytest.raises(AssertionError, match=r"over the budget 1\.000e-06$"):
        assert_rel_rms(rounded, FEW, 1e-6, "a BF16 output where FP32 is due")


def test_rounding_to_the_dtype_excuses_no_overflow_and_no_wrong_scale() -> None:
    large = torch.full((4,), 1e39, dtype=torch.float64)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_rel_rms(torch.full((4,), torch.inf).bfloat16(), large, 1.8e-3, "y", detect_scale=None)
    coarse = torch.full((4,), 1.06, dtype=torch.float64)  # rounds to 1 or 1.125 in FP8, 6 % away
    with pytest.raises(AssertionError, match="would accept a scale"):
        assert_rel_rms(coarse.to(torch.float8_e4m3fn), coarse, 3e-2, "y")


def test_nan_and_infinity_are_refused() -> None:
    for value in (float("nan"), float("inf")):
        got = WANT.clone()
        got[3, 5] = value
        for scale in (1.02, None):
            with pytest.raises(AssertionError, match="is over the budget"):
                assert_rel_rms(got, WANT, 1e-2, "y", detect_scale=scale)


def test_a_zero_reference_wants_exact_zeros() -> None:
    zero = torch.zeros(8, dtype=torch.float64)
    assert assert_rel_rms(zero.float(), zero, 1e-2, "y") == 0.0
    for value in (1e-30, float("nan")):
        with pytest.raises(AssertionError, match="exactly zero"):
            assert_rel_rms(torch.full((8,), value), zero, 1e-2, "y")


def test_a_shape_that_would_broadcast_is_refused() -> None:
    for gate in (lambda a, b: assert_rel_rms(a, b, 1e-2, "y"), lambda a, b: assert_same_bits(a, b, "y")):
        with pytest.raises(AssertionError, match=r"y: shape \[1, 32\] instead of \[64, 32\]"):
            gate(WANT[:1], WANT)


def test_nothing_equals_nothing() -> None:
    empty = torch.empty(0, 4)
    assert assert_rel_rms(empty, empty.double(), 1e-2, "y") == 0.0
    assert_same_bits(empty, empty, "y")


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.int64],
)
def test_the_first_different_element_is_named(dtype: torch.dtype) -> None:
    want = torch.arange(24).reshape(2, 3, 4).to(dtype)
    got = want.clone()
    assert_same_bits(got, want, "y")
    bits = got.view(torch.uint8)
    bits[1, 0, 2 * got.element_size()] ^= 1
    bits[1, 2, 3 * got.element_size()] ^= 1
    with pytest.raises(AssertionError, match=r"^y: 2 of \d+ elements differ, first at \[1, 0, 2\]: .*0x"):
        assert_same_bits(got, want, "y")


def test_bits_count_not_values() -> None:
    plus = torch.tensor([1.0, 0.0])
    minus = torch.tensor([1.0, -0.0])
    nan = torch.tensor([float("nan")])
    other_nan = (nan.view(torch.int32) + 1).view(torch.float32)
    assert torch.equal(plus, minus)
    with pytest.raises(AssertionError, match=r"first at \[1\]: 0.0 \(0x00000000\) instead of -0.0 \(0x80000000\)"):
        assert_same_bits(plus, minus, "y")
    assert_same_bits(nan, nan.clone(), "y")
    with pytest.raises(AssertionError, match=r"first at \[0\]"):
        assert_same_bits(nan, other_nan, "y")


def test_a_scalar_a_strided_tensor_and_another_dtype_are_compared() -> None:
    assert_same_bits(torch.arange(12.0).reshape(3, 4).t(), torch.arange(12.0).reshape(3, 4).t().contiguous(), "y")
    with pytest.raises(AssertionError, match=r"first at \[\]"):
        assert_same_bits(torch.tensor(1.0), torch.tensor(2.0), "y")
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_bits(torch.zeros(2, dtype=torch.int32), torch.zeros(2), "y")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2])
def test_poison_is_nan(dtype: torch.dtype) -> None:
    tensor = poisoned_empty((3, 5), dtype, "cpu")
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 5), dtype, True)
    assert bool(tensor.float().isnan().all())


def test_poison_of_an_integer_is_all_ones() -> None:
    assert poisoned_empty((4,), torch.int32, "cpu").tolist() == [-1] * 4
    assert poisoned_empty((0, 3), torch.uint8, "cpu").shape == (0, 3)
    assert poisoned_empty((), torch.int16, "cpu").item() == -1


@pytest.mark.parametrize(
    ("offset", "message"), [(-1, "1 bytes before the tensor were written, the nearest 1"), (15, "behind"), (17, "3")]
)
def test_a_write_outside_the_tensor_is_seen(offset: int, message: str) -> None:
    tensor = poisoned_empty((3, 5), torch.uint8, "cpu")
    tensor.fill_(1)
    assert_guards(tensor, "y")
    assert_guards(tensor[1:, ::2], "y")
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (527,), (1,))
    raw[tensor.storage_offset() + offset] = 0
    with pytest.raises(AssertionError, match=f"^y: .*{message}"):
        assert_guards(tensor, "y")


def test_a_tensor_without_guards_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="made by poisoned_empty"):
        assert_guards(torch.zeros(4), "y")


def operands() -> dict[str, Tensor | None]:
    return {"x": torch.randn(4, 4, requires_grad=True), "w": torch.randn(4), "bias": None}


def test_operands_that_are_only_read_pass() -> None:
    """X06: reading, detaching, and a backward for other leaves."""
    given = operands()
    x, w = given["x"], given["w"]
    assert x is not None
    assert w is not None
    with assert_operands_untouched(given):
        (x * w).sum()
        (grad,) = torch.autograd.grad((x * w).sum(), x)
    with assert_operands_untouched(given, retains_grad=True):
        (x * w).sum().backward()
    assert torch.equal(grad, w.expand(4, 4))


def test_a_write_into_an_operand_is_seen() -> None:
    """X06: changed bits, a write of equal bits, and a gradient stored in the caller's tensor."""
    given = operands()
    x, w = given["x"], given["w"]
    assert x is not None
    assert w is not None
    with pytest.raises(AssertionError, match=r"operand w: 1 of 4 elements differ, first at \[2\]"):  # noqa: SIM117
        with assert_operands_untouched(given):
            w.data[2] += 1
    with pytest.raises(AssertionError, match="operand w: written in place 1 times"):  # noqa: SIM117
        with assert_operands_untouched(given):
            w.mul_(1)
    with pytest.raises(AssertionError, match="operand x: its grad"):  # noqa: SIM117
        with assert_operands_untouched(given):
            x.square().sum().backward()


def test_an_error_inside_the_block_is_not_hidden() -> None:
    given = operands()

    def fails() -> None:
        assert given["w"] is not None
        given["w"].mul_(2)
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"), assert_operands_untouched(given):
        fails()


def test_a_fresh_process_is_another_one_and_returns_tensors() -> None:
    pid = fresh_process("os:getpid")
    assert isinstance(pid, int)
    assert pid != os.getpid()
    tensor = torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)
    assert_same_bits(fresh_process("torch:clone", tensor), tensor, "tensor")


def test_a_fresh_process_has_this_ones_path_and_nothing_of_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("only-here")
    assert "only-here" in fresh_process("sys:path.copy")
    assert fresh_process("sys:modules.__contains__", "torch") is False


def test_an_error_of_a_fresh_process_arrives_with_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        fresh_process("operator:floordiv", 1, 0)
    assert any("Traceback" in note for note in raised.value.__notes__)
    with pytest.raises(RuntimeError, match="exit status 3 and no result"):
        fresh_process("os:_exit", 3)
    with pytest.raises(RuntimeError, match="does not pickle"):
        fresh_process("threading:Lock")
    with pytest.raises(ValueError, match="'module:function'"):
        fresh_process("os.getpid")


def test_gates_hold_without_assert_statements() -> None:
    code = (
        "import torch; from cake_core.testing.gates import assert_rel_rms\n"
        "assert_rel_rms(torch.ones(3), 2 * torch.ones(3), 1e-2, 'y')"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert "AssertionError: y: relative RMS" in done.stderr
