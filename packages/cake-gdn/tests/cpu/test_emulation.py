"""The chunk form against the token recurrence, and what the roundings of the Hopper kernels cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.operands import normal
from cake_gdn.testing import budgets, emulation, oracle, shapes, steps
from cake_gdn.testing.tiles import EXACT, HOPPER, POINTS, Rounding, Tiles, make_tiles
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

F64 = torch.float64


def emulate(step: steps.Step, rounding: Rounding = HOPPER, **options: Any) -> emulation.Emulated:
    operands = (step.q, step.k, step.v, step.g, step.beta, step.do, step.dht)
    given = {"initial_state": step.state, "cu_seqlens": step.cu, "use_qk_l2norm": step.norm, "scale": step.scale}
    return emulation.emulate(*operands, rounding=rounding, **given, **options)


def assert_exact(got: emulation.Emulated, want: dict[str, Tensor], where: str) -> None:
    for name in oracle.NAMES:
        assert_rel_rms(got[name], want[name], 1e-12, f"{where} {name}")


@pytest.mark.parametrize(("heads", "norm"), [((2, 2), True), ((1, 2), False), ((1, 3), True), ((2, 4), False)])
def test_without_roundings_the_chunk_form_is_the_recurrence(heads: tuple[int, int], norm: bool) -> None:
    """Spec 3.2 and 3.3 to the letter, FP64: ragged, empty and one-token documents, both states, padding."""
    step = steps.make_step((0, 1, 64, 65, 0, 130), heads, dtype="float64", norm=norm, state=True, padding=3)
    want = step.reference()
    for stride in (1, 2):
        assert_exact(emulate(step, EXACT, stride=stride), want, f"{heads} {norm} {stride}")


@pytest.mark.parametrize("gates", shapes.GATES)
def test_every_gate_regime_is_exact_without_roundings(gates: str) -> None:
    step = steps.make_step((130, 63), (1, 2), dtype="float64", gates=gates, state=True)
    assert_exact(emulate(step, EXACT), step.reference(), gates)


def test_strong_gates_and_resets_stay_finite_and_exact() -> None:
    """g = -50 for a chunk, -inf at single tokens, beta of 0, 1 and 2: no e^{-G}, no division by beta."""
    step = steps.make_step((130,), (1, 2), dtype="float64", state=True)
    step.g[0, :64, 0] = -50.0
    step.g[0, [3, 70], 1] = -torch.inf
    step.beta[0, 10:20] = 0.0
    step.beta[0, 20:30] = 1.0
    step.beta[0, 30:40] = 2.0
    assert_exact(emulate(step, EXACT), step.reference(), "strong")


@pytest.mark.parametrize("norm", [True, False])
def test_segments_compose_to_the_serial_scan(norm: bool) -> None:
    """Spec 3.7: S_in = M_f S_in + B_f and dS = M_f^T dS + d_f, FP64, segments of two chunks."""
    step = steps.make_step((10, 330), (1, 2), dtype="float64", norm=norm, state=True)
    assert_exact(emulate(step, EXACT, segment=2, warm_up=False), step.reference(), "segments")


def test_the_warm_up_forgets_what_decayed_by_e_to_the_minus_ten() -> None:
    """Heads with strong gates skip chunks; the error is e^-10 of the state at most, and the truncation is there."""
    step = steps.make_step((512,), (1, 2), dtype="float64", gates="qwen-1", state=True)
    step.g[..., 1] = -0.05  # 3.2 a chunk: four chunks of the segment reach -10
    serial, cut = emulate(step, EXACT), emulate(step, EXACT, segment=4)
    for name in oracle.NAMES:
        assert_rel_rms(cut[name], serial[name], 1e-4, name)
    assert not torch.equal(cut.o, serial.o)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("gates", shapes.GATES)
def test_the_rounded_kernels_stay_within_the_budgets(gates: str, norm: bool) -> None:
    """Every output, strides 1 and 2; the budgets are 1.4 times the worst of these, at 2048 tokens."""
    step = steps.make_step((200, 65), (1, 2), gates=gates, norm=norm, state=True)
    want = step.reference()
    for stride in (1, 2):
        got = emulate(step, stride=stride)
        steps.assert_accurate({name: got[name] for name in oracle.NAMES}, want, f"{gates} {stride}", gates=gates)


def test_segments_cost_no_more_than_the_serial_scan() -> None:
    """Spec 8: within 1.1 times the error of serial. The walked maps keep the identity in FP32."""
    step = steps.make_step((640,), (1, 2), gates="none", state=True)
    want = step.reference()
    serial, cut = emulate(step), emulate(step, segment=4)
    for name in oracle.NAMES:
        errors = [assert_rel_rms(e[name], want[name], budgets.BUDGETS[name].rel_rms, name) for e in (serial, cut)]
        assert errors[1] <= 1.1 * errors[0], name


def test_without_the_norm_walked_operands_are_sums_of_three() -> None:
    """Spec 3.7: nothing bounds the map then, so its operands lose nothing; with one BF16 number each they would."""
    step = steps.make_step((256,), (1, 2), gates="none", norm=False)
    assert step.do is not None
    operands = step.q, step.k, step.v, step.g, step.beta
    wide, t = (make_tiles(*operands, wide=dtype) for dtype in (torch.float64, torch.float32))
    rounding, do = HOPPER.without("Z", "ZD", "P", "Q'"), step.do[0]

    def walked(tiles: Tiles, how: Rounding) -> tuple[Tensor, ...]:
        p = emulation.prep(tiles, how)
        adjoint = emulation.walk_adjoint(tiles, p, tiles.chunks.tile(do.to(how.wide)), (0, 4), how, warm_up=False)
        return *emulation.walk_state(tiles, p, (0, 4), how, warm_up=False), adjoint

    want = walked(wide, EXACT)
    for norm, (least, most) in ((False, (0.0, 1e-5)), (True, (5e-4, 1e-2))):
        t.norm = norm  # says how operands are rounded; the rows stay as they are
        for name, value, exactly in zip(("B", "M", "d"), walked(t, rounding), want, strict=True):
            error = float((value.double() - exactly).norm() / exactly.norm())
            assert least <= error <= most, f"{name}: {error:.1e}"


@pytest.mark.parametrize("point", sorted(POINTS))
def test_every_rounding_point_is_felt(point: str) -> None:
    """With one value kept wide some output changes: no point is written down and not used."""
    step = steps.make_step((130,), (1, 2), state=True)
    rounded, wide = emulate(step, stride=2), emulate(step, HOPPER.without(point), stride=2)
    assert any(not torch.equal(rounded[name], wide[name]) for name in oracle.NAMES)


def test_a_point_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no rounding point"):
        HOPPER("w", torch.ones(1))


# --- Z ----------------------------------------------------------------------------------------------------------


def gram(keys: Tensor) -> Tensor:
    return (keys @ keys.mT).tril(-1)


def unit_keys(kind: str) -> Tensor:
    keys = normal(0, 4, 64, 128, dtype=F64)
    if kind == "identical":
        keys = keys[:, :1].expand(4, 64, 128)
    if kind == "alternating":
        keys = keys[:, :1] * torch.tensor([1.0, -1.0], dtype=F64).repeat(32)[:, None]
    return torch.nn.functional.normalize(keys, dim=-1)


@pytest.mark.parametrize("kind", ["random", "identical", "alternating"])
@pytest.mark.parametrize("beta", ["random", 0.0, 1.0, 2.0])
def test_blocked_z_equals_solve_and_is_bounded_by_one(kind: str, beta: float | str) -> None:
    """Z = -(I + N diag(b))^{-1} N; its identities serve forward and adjoint alike; |Z| <= 1 for unit keys, b <= 2."""
    N = gram(unit_keys(kind))
    b = normal(1, 4, 64, dtype=F64).sigmoid() * 2 if isinstance(beta, str) else torch.full((4, 64), beta, dtype=F64)
    Z = emulation.solve_z(N, b)
    eye = torch.eye(64, dtype=F64)
    want = -torch.linalg.solve(eye + N * b[:, None, :], N)
    torch.testing.assert_close(Z, want, rtol=1e-11, atol=1e-12)
    assert float(Z.abs().max()) <= 1 + 1e-12
    assert not Z.triu().any()
    left, right = eye + b[:, :, None] * N, eye + N * b[:, None, :]
    torch.testing.assert_close(left @ (eye + b[:, :, None] * Z), eye.expand(4, 64, 64), rtol=0, atol=1e-11)
    torch.testing.assert_close((eye + Z * b[:, None, :]) @ right, eye.expand(4, 64, 64), rtol=0, atol=1e-11)


def test_the_first_token_of_a_document_has_no_gate_gradient() -> None:
    """Exactly 0.0 without an initial state, in the rounded kernels too."""
    step = steps.make_step((70, 1, 130), (1, 2))
    got = emulate(step)
    assert got.dg[0, [0, 70, 71]].eq(0.0).all()
    assert got.dg[0, [1, 72]].ne(0.0).all()


def test_tiles_of_one_document_do_not_depend_on_the_pack() -> None:
    """NaN in the neighbours; the tapes of a document keep their bits, at stride 2 as well."""
    step = steps.make_step((70, 200, 30), (1, 2), state=True)
    alone = emulate(step.document(1), stride=2)
    for t in (step.q, step.k, step.v, step.g, step.beta, step.do, step.state, step.dht):
        assert t is not None
        rows = t[0] if t.shape[0] == 1 else t
        rows[: 70 if t.shape[0] == 1 else 1] = torch.nan
        rows[270 if t.shape[0] == 1 else 2 :] = torch.nan
    packed = emulate(step, stride=2)
    for name in oracle.NAMES:
        own = packed[name][1:2] if name in ("final_state", "dh0") else packed[name][:, 70:270]
        assert_same_bits(own, alone[name], name)
    for got, want in ((packed.prepared.Z, alone.prepared.Z), (packed.scanned.S, alone.scanned.S)):
        assert_same_bits(got[2:6], want, "tape")


@pytest.mark.parametrize("segment", [None, 2])
def test_the_emulation_runs_where_its_operands_are(segment: int | None) -> None:
    """The benchmark's reference on a device: a tensor that is made on the CPU would not go with the others."""
    with FakeTensorMode():
        q, k, v, do = (torch.empty(1, 300, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (1, 1, 2, 2))
        g, beta = (torch.empty(1, 300, 2, device="cuda") for _ in range(2))
        found = emulation.emulate(
            q, k, v, g, beta, do, rounding=EXACT, cu_seqlens=[0, 70, 300], use_qk_l2norm=True, segment=segment
        )
        assert {found[name].device for name in oracle.NAMES} == {torch.device("cuda", 0)}
