"""Every row of the error table: the kind, the argument, what it got, and nothing written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cake_norms.gated_rmsnorm import rmsnorm_gate, rmsnorm_gate_bwd, rmsnorm_gate_fwd, rmsnorm_silu_gate
from cake_norms.rmsnorm import zero_centered_rmsnorm, zero_centered_rmsnorm_bwd, zero_centered_rmsnorm_fwd

X, Z, W, DY = torch.ones(6, 64), torch.ones(6, 64), torch.ones(64), torch.ones(6, 64)
RSTD = torch.ones(6)
META = torch.device("meta")


def case(name: str, kind: type[Exception], named: str, call: Callable[[], object]):
    return pytest.param(kind, named, call, id=name)


CASES = [
    case("x-list", TypeError, r"\bx\b.*list", lambda: zero_centered_rmsnorm([1.0], W)),
    case("weight-none", TypeError, r"weight.*None", lambda: zero_centered_rmsnorm(X, None)),
    case("eps-str", TypeError, r"eps.*str", lambda: zero_centered_rmsnorm(X, W, "1e-6")),
    case("eps-bool", TypeError, r"eps.*(bool|True)", lambda: zero_centered_rmsnorm(X, W, True)),
    case("eps-tensor", TypeError, r"eps.*Tensor", lambda: zero_centered_rmsnorm(X, W, torch.tensor(1e-6))),
    case("eps-negative", ValueError, r"eps.*-1", lambda: zero_centered_rmsnorm(X, W, -1.0)),
    case("eps-nan", ValueError, r"eps.*nan", lambda: zero_centered_rmsnorm(X, W, float("nan"))),
    case("keyword", TypeError, r"variant", lambda: zero_centered_rmsnorm(X, W, variant="det")),
    case("0-d", ValueError, r"\bx\b", lambda: zero_centered_rmsnorm(torch.tensor(1.0), torch.ones(1))),
    case("width", ValueError, r"(weight|x).*(63|64)", lambda: zero_centered_rmsnorm(X, torch.ones(63))),
    case("weight-2d", ValueError, r"weight", lambda: zero_centered_rmsnorm(X, torch.ones(1, 64))),
    case("x-half", ValueError, r"\bx\b.*float16", lambda: zero_centered_rmsnorm(X.half(), W)),
    case("x-int", ValueError, r"\bx\b.*int64", lambda: zero_centered_rmsnorm(X.long(), W)),
    case("x-complex", ValueError, r"\bx\b.*complex", lambda: zero_centered_rmsnorm(X.cfloat(), W)),
    case("weight-half", ValueError, r"weight.*float16", lambda: zero_centered_rmsnorm(X, W.half())),
    case("devices", ValueError, r"weight.*meta", lambda: zero_centered_rmsnorm(X, W.to(META))),
    case("dy-shape", ValueError, r"\bdy\b", lambda: zero_centered_rmsnorm_bwd(DY[:5], X, W, RSTD)),
    case("dy-device", ValueError, r"\bdy\b.*meta", lambda: zero_centered_rmsnorm_bwd(DY.to(META), X, W, RSTD)),
    case("rstd-shape", ValueError, r"rstd", lambda: zero_centered_rmsnorm_bwd(DY, X, W, RSTD[:5])),
    case("rstd-dtype", ValueError, r"rstd.*bfloat16", lambda: zero_centered_rmsnorm_bwd(DY, X, W, RSTD.bfloat16())),
    case("out-shape", ValueError, r"\bout\b", lambda: zero_centered_rmsnorm_fwd(X, W, out=torch.empty(5, 64))),
    case("out-dtype", ValueError, r"\bout\b", lambda: zero_centered_rmsnorm_fwd(X, W, out=X.double())),
    case("out-list", TypeError, r"\bout\b", lambda: zero_centered_rmsnorm_fwd(X, W, out=[])),
    case("out-is-x", ValueError, r"\bout\b.*\bx\b", lambda: zero_centered_rmsnorm_fwd(X, W, out=X)),
    case("dx-is-dy", ValueError, r"\bdx\b.*\bdy\b", lambda: zero_centered_rmsnorm_bwd(DY, X, W, RSTD, dx=DY)),
    case("dweight-is-w", ValueError, r"dweight.*weight", lambda: zero_centered_rmsnorm_bwd(DY, X, W, RSTD, dweight=W)),
    case(
        "dweight-shape",
        ValueError,
        r"dweight",
        lambda: zero_centered_rmsnorm_bwd(DY, X, W, RSTD, dweight=torch.empty(63)),
    ),
    case("needs", TypeError, r"needs", lambda: zero_centered_rmsnorm_bwd(DY, X, W, RSTD, needs="both")),
    case("gated-z-shape", ValueError, r"\bz\b", lambda: rmsnorm_silu_gate(X, Z[:5], W)),
    case("gated-flattened-x", ValueError, r"\bz\b", lambda: rmsnorm_silu_gate(X, Z.view(3, 2, 64), W)),
    case("gated-broadcast-z", ValueError, r"\bz\b", lambda: rmsnorm_silu_gate(X, Z[:1], W)),
    case("gated-z-dtype", ValueError, r"\bz\b.*bfloat16", lambda: rmsnorm_silu_gate(X, Z.bfloat16(), W)),
    case("gated-z-none", TypeError, r"\bz\b", lambda: rmsnorm_silu_gate(X, None, W)),
    case("gated-weight", ValueError, r"(weight|x)", lambda: rmsnorm_silu_gate(X, Z, W[:32])),
    case("activation", ValueError, r"activation.*gelu", lambda: rmsnorm_gate(X, Z, W, activation="gelu")),
    case("activation-type", TypeError, r"activation", lambda: rmsnorm_gate(X, Z, W, activation=None)),
    case("gated-out-is-z", ValueError, r"\bout\b.*\bz\b", lambda: rmsnorm_gate_fwd(X, Z, W, out=Z)),
    case("gated-dz-is-z", ValueError, r"\bdz\b.*\bz\b", lambda: rmsnorm_gate_bwd(DY, X, Z, W, dz=Z)),
    case(
        "gated-dz-is-dx",
        ValueError,
        r"(dx|dz)",
        lambda: (lambda t: rmsnorm_gate_bwd(DY, X, Z, W, dx=t, dz=t))(torch.empty(6, 64)),
    ),
    case("gated-dy", ValueError, r"\bdy\b", lambda: rmsnorm_gate_bwd(DY.view(3, 2, 64), X, Z, W)),
]


@pytest.mark.parametrize(("kind", "named", "call"), CASES)
def test_bad_input_names_its_argument(kind: type[Exception], named: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=named) as caught:
        call()
    if "keyword" not in str(caught.value) and kind is ValueError:
        assert "needs" in str(caught.value), "the message says what the argument needs"


def test_a_refused_call_leaves_given_outputs_as_they_were() -> None:
    out = torch.full((6, 64), 3.0)
    dx, dz = torch.full((6, 64), 4.0), torch.full((5, 64), 5.0)
    with pytest.raises(ValueError, match="rstd"):
        zero_centered_rmsnorm_fwd(X, W, out=out, rstd=torch.empty(5))
    with pytest.raises(ValueError, match="dz"):
        rmsnorm_gate_bwd(DY, X, Z, W, dx=dx, dz=dz)
    assert (out == 3.0).all()
    assert (dx == 4.0).all()
    assert (dz == 5.0).all()


@pytest.mark.parametrize("shift", [1, 63, 64])
def test_an_output_that_overlaps_an_input_partly_is_refused(shift: int) -> None:
    """The gradient of a slice must not be written over what is still read."""
    memory = torch.ones(7 * 64)
    x = memory[: 6 * 64].view(6, 64)
    out = memory[shift : shift + 6 * 64].view(6, 64)
    with pytest.raises(ValueError, match="out"):
        zero_centered_rmsnorm_fwd(x, W, out=out)


def test_neighbouring_columns_of_one_buffer_do_not_overlap() -> None:
    """The packed projection gradient holds dz beside other columns; byte ranges alone would refuse it."""
    packed = torch.zeros(6, 128)
    z = torch.ones(6, 64)
    rmsnorm_gate_bwd(DY, X, z, W, dx=packed[:, :64], dz=packed[:, 64:])
    assert packed.any()


def test_the_message_names_the_function_that_the_user_called() -> None:
    for name, call in (
        ("zero_centered_rmsnorm", lambda: zero_centered_rmsnorm(X.half(), W)),
        ("zero_centered_rmsnorm_fwd", lambda: zero_centered_rmsnorm_fwd(X.half(), W)),
        ("rmsnorm_silu_gate", lambda: rmsnorm_silu_gate(X.half(), Z, W)),
        ("rmsnorm_gate_bwd", lambda: rmsnorm_gate_bwd(DY, X.half(), Z, W)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: x is .*float16.*; needs "):
            call()
