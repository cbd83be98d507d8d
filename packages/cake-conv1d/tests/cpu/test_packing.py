"""Documents, layouts and strides: none of them changes a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cake_conv1d import causal_conv1d, causal_conv1d_bwd, causal_conv1d_fwd, conv_final_state
from cake_core import config
from cake_core.testing.gates import assert_same_bits, poisoned_empty
from cake_core.testing.operands import normal
from torch import Tensor

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NAN = float("nan")


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    config.configure()
    yield
    config.configure()


def offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def everything(
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    cu: Tensor | None = None,
    *,
    state: Tensor | None = None,
    d_final: Tensor | None = None,
) -> dict[str, Tensor]:
    """y, final state and every gradient, through autograd."""
    leaves = [t.detach().requires_grad_() for t in (x, w, state) if t is not None]
    options: dict[str, Any] = {"initial_state": leaves[2] if state is not None else None}
    y, final = causal_conv1d(leaves[0], leaves[1], cu, output_final_state=True, **options)
    d_final = torch.zeros_like(final) if d_final is None else d_final
    grads = torch.autograd.grad((y, final), leaves, (dy, d_final))
    names = ("dx", "dweight", "d_initial_state")
    return {"y": y.detach(), "final_state": final.detach(), **dict(zip(names, grads, strict=False))}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], *names: str) -> None:
    assert got.keys() == want.keys()
    for name in names or want:
        assert_same_bits(got[name], want[name], name)


# --- documents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_document_alone_has_the_bits_that_it_has_in_the_pack(width: int, stateful: bool) -> None:
    """Lengths below, at and above the halo, empty documents in every place, one that crosses a block of 2048."""
    lengths, channels, halo = (0, 5, 1, 0, 2, 3, 4, 2040, 70, 0, 0), 24, width - 1
    x, dy, w = normal(0, sum(lengths), channels), normal(1, sum(lengths), channels), normal(2, channels, width)
    states, d_finals = (normal(seed, len(lengths), halo, channels) for seed in (3, 4))
    packed = everything(x, w, dy, offsets(lengths), state=states if stateful else None, d_final=d_finals)
    start = 0
    for n, length in enumerate(lengths):
        rows, one = slice(start, start + length), slice(n, n + 1)
        alone = everything(x[rows], w, dy[rows], state=states[one] if stateful else None, d_final=d_finals[one])
        for name in ("y", "dx"):
            assert_same_bits(packed[name][rows], alone[name], f"{name} of document {n}")
        for name in ("final_state", "d_initial_state") if stateful else ("final_state",):
            assert_same_bits(packed[name][one], alone[name], f"{name} of document {n}")
        start += length


def test_documents_without_a_state_start_from_zeros() -> None:
    """Absent history is +0 and takes part in the sum: the same bits as a state of zeros."""
    x, dy, w = normal(0, 30, 16), normal(1, 30, 16), normal(2, 16, 4)
    cu = offsets((1, 2, 0, 27))
    bare, zeros = everything(x, w, dy, cu), everything(x, w, dy, cu, state=torch.zeros(4, 3, 16, dtype=BF16))
    for name in bare:
        assert_same_bits(bare[name], zeros[name], name)


def test_a_negative_zero_tap_at_the_document_start_keeps_the_sign_of_the_chain() -> None:
    """a = w0 * (+0); a = fma(w1, +0, a); ...: with negative taps the absent rows contribute -0, and -0 + -0 = -0."""
    w = torch.tensor([[-1.0, -1.0, -1.0, 1.0]])
    y = causal_conv1d_fwd(torch.tensor([[-0.0]], dtype=BF16), w, activation=None)
    assert y[0, 0].signbit()
    y = causal_conv1d_fwd(torch.tensor([[-0.0]], dtype=BF16), w.abs(), activation=None)
    assert not y[0, 0].signbit()


@pytest.mark.parametrize("value", [NAN, float("inf"), 1e30, -3.0])
@pytest.mark.parametrize("index", [0, 1, 2, 3])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_document_full_of_anything_leaves_the_others_alone(stateful: bool, index: int, value: float) -> None:
    """D02: y, dx and both states keep their bits, whatever x, dy and the state of one document hold."""
    lengths = (37, 2, 0, 91)
    x, dy, w = normal(0, 130, 16), normal(1, 130, 16), normal(2, 16, 4)
    states, d_finals = normal(3, 4, 3, 16), normal(4, 4, 3, 16)
    cu = offsets(lengths)
    given = {"state": states if stateful else None, "d_final": d_finals}
    want = everything(x, w, dy, cu, **given)
    ends = cu.tolist()
    inside = slice(ends[index], ends[index + 1])
    for rows, per_document in ((x, states), (dy, d_finals)):
        rows[inside] = value
        per_document[index] = value
    got = everything(x, w, dy, cu, **given)
    tokens = torch.ones(130, dtype=torch.bool)
    tokens[inside] = False
    documents = torch.arange(4) != index
    for name in ("y", "dx"):
        assert_same_bits(got[name][tokens], want[name][tokens], name)
    for name in ("final_state", "d_initial_state") if stateful else ("final_state",):
        assert_same_bits(got[name][documents], want[name][documents], name)
    if inside.start < inside.stop and value != value:
        assert got["y"][inside].isnan().all(), "the document itself"


def test_a_nan_token_reaches_three_more_tokens_and_its_channel_alone() -> None:
    """Spec 4: at most W tokens forward in y and backward in dx, and that channel's dweight."""
    x, dy, w = normal(0, 20, 8), normal(1, 20, 8), normal(2, 8, 4)
    for operand, reached in ((x, {"y": range(7, 11), "dx": range(4, 11)}), (dy, {"y": range(0), "dx": range(4, 8)})):
        kept = operand[7, 3].clone()
        operand[7, 3] = NAN
        got = everything(x, w, dy, offsets((20,)))
        operand[7, 3] = kept
        for name, tokens in reached.items():
            want = torch.zeros(20, 8, dtype=torch.bool)
            want[list(tokens), 3] = True
            assert torch.equal(got[name].isnan(), want), name
        assert got["dweight"].isnan().any(1).tolist() == [c == 3 for c in range(8)]


def test_offsets_may_be_int64() -> None:
    x, dy, w = normal(0, 40, 8), normal(1, 40, 8), normal(2, 8, 4)
    lengths = (7, 0, 1, 32)
    assert_same(everything(x, w, dy, offsets(lengths, torch.int64)), everything(x, w, dy, offsets(lengths)))


def test_documents_that_are_all_empty() -> None:
    x, w = normal(0, 0, 8), normal(1, 8, 4)
    got = everything(x, w, x, offsets((0, 0, 0)))
    assert got["y"].shape == (0, 8)
    assert not got["final_state"].any()
    assert got["final_state"].shape == (3, 3, 8)


# --- shapes -----------------------------------------------------------------------------------------------------


def test_a_batch_is_packed_documents_of_one_length() -> None:
    """[B, T, C] without cu_seqlens: every result has the packed call's bits, in the shape of x."""
    x, dy, w = normal(0, 3, 50, 16), normal(1, 3, 50, 16), normal(2, 16, 4)
    state, d_final = normal(3, 3, 3, 16), normal(4, 3, 3, 16)
    got = everything(x, w, dy, state=state, d_final=d_final)
    flat = [t.view(150, 16) for t in (x, dy)]
    want = everything(flat[0], w, flat[1], offsets((50, 50, 50)), state=state, d_final=d_final)
    assert (got["y"].shape, got["dx"].shape) == (x.shape, x.shape)
    for name in want:
        assert_same_bits(got[name].reshape(want[name].shape), want[name], name)


def test_a_leading_one_is_the_packed_call() -> None:
    x, dy, w = normal(0, 1, 50, 16), normal(1, 1, 50, 16), normal(2, 16, 4)
    for cu in (None, offsets((20, 30))):
        got, want = everything(x, w, dy, cu), everything(x[0], w, dy[0], cu)
        assert got["y"].shape == got["dx"].shape == (1, 50, 16)
        for name in want:
            assert_same_bits(got[name].reshape(want[name].shape), want[name], name)


@pytest.mark.parametrize("taps", [BF16, F32])
def test_a_conv1d_weight_is_taken_and_its_gradient_has_its_shape(taps: torch.dtype) -> None:
    """nn.Conv1d stores [C, 1, W]; the oldest tap is first in both."""
    x, dy, w = normal(0, 50, 16), normal(1, 50, 16), normal(2, 16, 4, dtype=taps)
    got, want = everything(x, w[:, None], dy), everything(x, w, dy)
    assert got["dweight"].shape == (16, 1, 4)
    assert got["dweight"].dtype == taps
    got["dweight"] = got["dweight"][:, 0]
    assert_same(got, want)
    conv = torch.nn.functional.conv1d(x.double().t()[None], w.double()[:, None], padding=3, groups=16)[0, :, :50].t()
    torch.testing.assert_close(causal_conv1d_fwd(x.double(), w.double(), activation=None), conv)


@pytest.mark.parametrize("channels", [1, 3, 7, 65])
def test_the_cpu_takes_any_number_of_channels(channels: int) -> None:
    x, dy, w = normal(0, 20, 72), normal(1, 20, 72), normal(2, 72, 4)
    wide = everything(x, w, dy, offsets((4, 16)))
    got = everything(x[:, :channels], w[:channels], dy[:, :channels], offsets((4, 16)))
    for name in got:
        columns = wide[name][:channels] if name == "dweight" else wide[name][..., :channels]
        assert_same_bits(got[name], columns.contiguous(), name)


# --- strides ----------------------------------------------------------------------------------------------------


def column_slice(t: Tensor) -> Tensor:
    wide = torch.full((*t.shape[:-1], 3 * t.shape[-1]), NAN, dtype=t.dtype)
    view = wide[..., t.shape[-1] : 2 * t.shape[-1]]
    view.copy_(t)
    return view


def every_second_column(t: Tensor) -> Tensor:
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), NAN, dtype=t.dtype)
    view = wide[..., 1::2]
    view.copy_(t)
    return view


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": column_slice,
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "odd": every_second_column,
    "expanded-rows": lambda t: t[..., :1, :].expand_as(t),
    "expanded": lambda t: t[..., :1, :1].expand_as(t),
    "negated": lambda t: torch._neg_view(-t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", ["x", "dy", "w", "state", "d_final"])
def test_strided_operands_have_the_bits_of_contiguous_ones(operand: str, layout: str) -> None:
    operands = {
        "x": normal(0, 33, 16),
        "dy": normal(1, 33, 16),
        "w": normal(2, 16, 4),
        "state": normal(3, 3, 3, 16),
        "d_final": normal(4, 3, 3, 16),
    }
    operands[operand] = LAYOUTS[layout](operands[operand])
    if layout != "negated":
        assert not operands[operand].is_contiguous()
    dense = {name: value.clone(memory_format=torch.contiguous_format) for name, value in operands.items()}
    got, want = (
        everything(t["x"], t["w"], t["dy"], offsets((1, 0, 32)), state=t["state"], d_final=t["d_final"])
        for t in (operands, dense)
    )
    assert_same(got, want)
    for name in ("y", "dx", "dweight"):
        assert got[name].is_contiguous(), f"{name} is always fresh and dense"


@pytest.mark.parametrize("layout", ["slice", "transposed", "odd"])
def test_a_strided_batch_is_read_by_its_strides(layout: str) -> None:
    """stride(0) is not T * stride(1): flattening it without a look would read other rows."""
    x, dy, w = normal(0, 3, 20, 16), normal(1, 3, 20, 16), normal(2, 16, 4)
    take = {**LAYOUTS, "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)}[layout]
    assert_same(everything(take(x), w, take(dy)), everything(x, w, dy))


def test_a_single_token_never_uses_its_token_stride() -> None:
    x = normal(0, 64)[:8].as_strided((1, 8), (10**12, 1))
    w = normal(1, 8, 4)
    assert_same(everything(x, w, x), everything(x.clone(), w, x.clone()))


# --- given outputs ----------------------------------------------------------------------------------------------


def test_given_outputs_are_written_and_returned() -> None:
    """Rows of a wider buffer; nothing beside them is touched, and what was there before does not count."""
    x, dy, w, cu = normal(0, 33, 16), normal(1, 33, 16), normal(2, 16, 4), offsets((1, 0, 32))
    want = everything(x, w, dy, cu)
    wide = {name: torch.full((33, 48), NAN, dtype=BF16) for name in ("out", "dx")}
    views = {name: buffer[:, 16:32] for name, buffer in wide.items()}
    assert causal_conv1d_fwd(x, w, cu, out=views["out"]) is views["out"]
    main_grad = torch.full((16, 4), 7.0)
    dx, dweight, _ = causal_conv1d_bwd(x, w, dy, cu, dx=views["dx"], dweight=main_grad, needs=(True, True, False))
    assert dx is views["dx"]
    assert dweight is main_grad
    assert_same_bits(views["out"].contiguous(), want["y"], "out")
    assert_same_bits(views["dx"].contiguous(), want["dx"], "dx")
    assert_same_bits(main_grad.to(BF16), want["dweight"], "FP32 main gradient of BF16 taps")
    for buffer in wide.values():
        assert buffer[:, :16].isnan().all()
        assert buffer[:, 32:].isnan().all()


@pytest.mark.parametrize("final", [False, True])
def test_given_outputs_are_zeros_where_nothing_contributes(final: bool) -> None:
    """Without a gradient of y dweight is 0; without any gradient dx is too. What was in them never stays."""
    x, w = torch.ones(7, 8), torch.ones(8, 4)
    dx, dweight = torch.full_like(x, 5.0), torch.full_like(w, 5.0)
    d_final = torch.ones(1, 3, 8) if final else None
    got = causal_conv1d_bwd(x, w, None, d_final_state=d_final, dx=dx, dweight=dweight)
    assert got[0] is dx
    assert got[1] is dweight
    assert float(dweight.abs().max()) == 0
    assert dx.sum() == (24 if final else 0)


def test_every_row_of_a_poisoned_output_is_written() -> None:
    x, dy, w, cu = normal(0, 33, 16), normal(1, 33, 16), normal(2, 16, 4), offsets((0, 1, 2, 30, 0))
    out, dx = poisoned_empty((33, 16), BF16, "cpu"), poisoned_empty((33, 16), BF16, "cpu")
    dw = poisoned_empty((16, 4), F32, "cpu")
    causal_conv1d_fwd(x, w, cu, out=out)
    causal_conv1d_bwd(x, w, dy, cu, dx=dx, dweight=dw, needs=(True, True, False))
    want = everything(x, w.float(), dy, cu)
    for name, got in (("y", out), ("dx", dx), ("dweight", dw)):
        assert_same_bits(got, want[name], name)


# --- states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 1026, 1027])
def test_the_final_state_is_the_last_rows_and_falls_back_into_the_initial_state(length: int) -> None:
    """vllm PR 9838: a state that straddles a vector or a block, lengths around 1026, and documents below W - 1."""
    x, state, w = normal(0, length, 8), normal(1, 1, 3, 8), normal(2, 8, 4)
    for initial in (None, state):
        before = torch.zeros(3, 8, dtype=BF16) if initial is None else state[0]
        want = torch.cat((before, x))[-3:][None]
        assert_same_bits(conv_final_state(x, 4, initial_state=initial), want, "conv_final_state")
        _, final = causal_conv1d(x, w, initial_state=initial, output_final_state=True)
        assert_same_bits(final, want, "final_state")
        assert final.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 50, 99, 100])
def test_a_document_may_be_cut_and_continued_from_its_state(cut: int) -> None:
    """The rows that one call hands over are the history of the next: the bits of the uncut document."""
    x, dy, w = normal(0, 100, 8), normal(1, 100, 8), normal(2, 8, 4)
    whole = everything(x, w, dy)
    first = causal_conv1d_fwd(x[:cut], w)
    state = conv_final_state(x[:cut], 4)
    second, final = causal_conv1d(x[cut:], w, initial_state=state, output_final_state=True)
    assert_same_bits(torch.cat((first, second)), whole["y"], "y")
    assert_same_bits(final, whole["final_state"], "final_state")


@pytest.mark.parametrize("state", [BF16, F32])
def test_the_final_state_has_the_dtype_of_the_initial_one(state: torch.dtype) -> None:
    x, w = normal(0, 2, 8), normal(1, 8, 4)
    initial = normal(2, 1, 3, 8, dtype=F32).to(state)
    got = everything(x, w, x, state=initial)
    assert got["final_state"].dtype == got["d_initial_state"].dtype == state
    assert_same_bits(got["final_state"][0, 0], initial[0, 2], "the row that the document does not replace")
    assert_same_bits(got["final_state"][0, 1:], x.to(state), "its own rows")


def test_a_row_of_the_initial_state_that_comes_out_again_carries_both_gradients() -> None:
    """fla #1140: a document of one token; row 1 of the state is read by its taps and is row 0 of the final state."""
    w = torch.tensor([[2.0, 3.0, 5.0, 7.0]])
    x = torch.zeros(1, 1, dtype=F32)
    got = everything(
        x, w, torch.ones(1, 1), state=torch.zeros(1, 3, 1), d_final=torch.tensor([[[100.0], [200.0], [400.0]]])
    )
    slope = 0.5  # of silu at 0
    assert got["dx"].flatten().tolist() == [7 * slope + 400]
    assert got["d_initial_state"].flatten().tolist() == [2 * slope, 3 * slope + 100, 5 * slope + 200]


def test_a_default_device_of_torch_changes_nothing() -> None:
    """The CPU backend makes what it needs where the operands are."""
    x, w, state = (t.requires_grad_() for t in (torch.ones(7, 8), torch.ones(8, 4), torch.ones(2, 3, 8)))
    cu = torch.tensor([0, 2, 7])
    with torch.device("meta"):
        y, final = causal_conv1d(x, w, cu, initial_state=state, output_final_state=True)
        grads = torch.autograd.grad((y, final), (x, w, state), (y.detach(), final.detach()))
        whole = causal_conv1d(x, w)
    assert {t.device.type for t in (y, final, whole, *grads)} == {"cpu"}
