"""The synthetic op: results, variants, and what it would launch on each device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cake_core import config, configure, manifest, registry
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.gates import assert_rel_rms, assert_same_bits
from cake_core.testing.launches import Launch, recorded_launches
from cake_core.testing.synthetic_op import OP, api, check_supported, is_supported, plan
from cake_core.testing.synthetic_op.testing import oracle, routes


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with registry.override({"synthetic": OP}):
        yield


def emulate(launch: Launch) -> None:
    """What the programs compute, on the memory of the fake devices."""
    if "_fwd_" in launch.library:
        y, x, weight = launch.args
        y.copy_(x * weight)
        return
    dx, dweight, _, dy, x, weight, _ = launch.args
    if dx is not None:
        dx.copy_(dy * weight)
    if dweight is not None:
        dweight.copy_((dy * x).sum(0))


def test_its_manifest_is_up_to_date() -> None:
    """R87: build.json is what libraries.toml and the sources give."""
    assert manifest.check(Path(api.__file__).parent / "kernels") == ()


@pytest.mark.parametrize("columns", [1, 3, 64])
@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257])
def test_rows_at_the_edges_of_a_chunk(rows: int, columns: int) -> None:
    case = routes.make_case(device="cpu", seed=rows, rows=rows, columns=columns)
    got, want = case.run["step"](), case.want()
    for name, value in got.items():
        assert_rel_rms(value, want[name], 1e-6, name, detect_scale=1.02)


def test_a_strided_operand_gives_the_bits_of_its_copy() -> None:
    wide, weight = torch.randn(70, 12), torch.randn(24)[::4]
    x, dy = wide[:, ::2], torch.randn(6, 70).t()
    assert_same_bits(api.scale_columns_fwd(x, weight), api.scale_columns_fwd(x.clone(), weight.clone()), "y")
    strided = api.scale_columns_bwd(dy, x, weight)
    dense = api.scale_columns_bwd(dy.contiguous(), x.contiguous(), weight.contiguous())
    for name, got, want in zip(("dx", "dweight"), strided, dense, strict=True):
        assert got is not None
        assert want is not None
        assert_same_bits(got, want, name)


def test_gradients_are_made_only_where_they_are_needed() -> None:
    x, weight = torch.randn(70, 8), torch.randn(8)
    dx, dweight = api.scale_columns_bwd(x, x, weight, needs=(False, True))
    assert dx is None
    assert dweight is not None
    x.requires_grad_()
    api.scale_columns(x, weight).sum().backward()
    assert x.grad is not None
    assert_rel_rms(x.grad, oracle.scale_columns(torch.ones_like(x), weight), 1e-6, "dx")


@pytest.mark.parametrize(
    ("capability", "columns", "variant", "rows", "wanted"),
    [
        ((9, 0), 64, "det", 300, ("scale_fwd_vec4_sm_90a", "scale_bwd_det_vec4_sm_90a")),
        ((9, 0), 63, "fast", 300, ("scale_fwd_vec1_sm_90a", "scale_bwd_fast_vec1_sm_90a")),
        ((9, 0), 64, "fast", 63, ("scale_fwd_vec4_sm_90a", "scale_bwd_det_vec4_sm_90a")),
        ((12, 0), 64, "det", 300, ("scale_fwd_vec4_sm_80", "scale_bwd_det_vec4_sm_80")),
    ],
)
def test_device_shape_and_variant_choose_the_library(
    capability: tuple[int, int], columns: int, variant: str, rows: int, wanted: tuple[str, ...]
) -> None:
    """R46: an architecture the package has no entry for runs the portable one."""
    configure(cake_synthetic_variant=variant)
    with FakeCuda(capability=capability) as fake, recorded_launches(emulate) as launches:
        x = fake.cuda(torch.randn(rows, columns), 1).requires_grad_()
        weight = fake.cuda(torch.randn(columns), 1).requires_grad_()
        api.scale_columns(x, weight).sum().backward()
        assert tuple(launch.library for launch in launches) == wanted
        assert {launch.index for launch in launches} == {1}
        assert {allocation.index for allocation in fake.allocations} == {1}


def test_a_capability_without_a_program_is_refused_by_name() -> None:
    """R46: no silent fallback; the message names the capability and what is served."""
    with FakeCuda(capability=(7, 5)) as fake, recorded_launches(), pytest.raises(NotImplementedError) as caught:
        api.scale_columns(fake.cuda(torch.ones(2, 4)), fake.cuda(torch.ones(4)))
    assert "7.5" in str(caught.value)
    assert "sm_80, sm_90a" in str(caught.value)


def test_det_scratch_is_sized_by_the_shape_and_the_option() -> None:
    with FakeCuda() as fake, recorded_launches() as launches:
        x, weight = fake.cuda(torch.ones(300, 8)), fake.cuda(torch.ones(8))
        for option, chunks in ((256, 2), (100, 3)):
            configure(cake_synthetic_rows_per_chunk=option)
            api.scale_columns_bwd(x, x, weight)
            partial, rows_per_chunk = launches[-1].args[2], launches[-1].args[6]
            assert rows_per_chunk == option
            assert partial.numel() >= 4 * 8 * chunks


def test_the_variant_is_read_when_the_call_runs() -> None:
    """R14: one function object, two configurations, two programs."""
    with FakeCuda() as fake, recorded_launches() as launches:
        x, weight = fake.cuda(torch.ones(300, 8)), fake.cuda(torch.ones(8))
        call = api.scale_columns_bwd
        for variant in ("det", "fast", "det"):
            configure(cake_synthetic_variant=variant)
            call(x, x, weight)
    assert [launch.library.split("_")[2] for launch in launches] == ["det", "fast", "det"]


def test_a_backward_runs_the_variant_of_its_forward() -> None:
    with FakeCuda() as fake, recorded_launches(emulate) as launches:
        x, weight = fake.cuda(torch.ones(300, 8)).requires_grad_(), fake.cuda(torch.ones(8))
        configure(cake_synthetic_variant="fast")
        y = api.scale_columns(x, weight)
        configure(cake_synthetic_variant="det")
        y.sum().backward()
    assert launches[-1].library == "scale_bwd_fast_vec4_sm_90a"


def test_a_call_that_only_det_serves_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """R23: fault X05: the reason for not running fast is in the log, once, and in the snapshot."""
    caplog.set_level(logging.INFO, "cake")
    configure(cake_synthetic_variant="fast")
    x, weight = torch.ones(3, 8), torch.ones(8)
    for _ in range(2):
        api.scale_columns_bwd(x, x, weight)
    reason = "fewer than 64 rows"
    assert [record.getMessage() for record in caplog.records if reason in record.getMessage()] == [
        f"synthetic: runs det instead of the configured variant: {reason}"
    ]
    assert config.snapshot()["ops"]["synthetic"]["reasons"] == [reason]


def test_deterministic_algorithms_of_torch_turn_fast_into_det(caplog: pytest.LogCaptureFixture) -> None:
    """R11: row q of the variant table, asked when the backward starts."""
    configure(cake_synthetic_variant="fast")
    with FakeCuda() as fake, recorded_launches(emulate) as launches:
        x, weight = fake.cuda(torch.ones(300, 8)).requires_grad_(), fake.cuda(torch.ones(8))
        y = api.scale_columns(x, weight)
        torch.use_deterministic_algorithms(True)
        try:
            y.sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert launches[-1].library == "scale_bwd_det_vec4_sm_90a"
    assert config.variant("synthetic") == "fast"


MISUSE = [
    (TypeError, "x is list", ([1.0], torch.ones(1))),
    (TypeError, "weight is NoneType", (torch.ones(1, 1), None)),
    (NotImplementedError, "x is on meta", (torch.ones(1, 1, device="meta"), torch.ones(1))),
    (ValueError, "weight is on meta; needs cpu, as x", (torch.ones(1, 1), torch.ones(1, device="meta"))),
    (ValueError, "weight is float64; needs float32", (torch.ones(1, 1), torch.ones(1).double())),
    (ValueError, r"x is of shape \(3,\)", (torch.ones(3), torch.ones(3))),
    (ValueError, r"x is of shape \(3, 0\)", (torch.ones(3, 0), torch.ones(0))),
    (ValueError, r"weight is of shape \(2,\); needs \(3,\)", (torch.ones(1, 3), torch.ones(2))),
]


@pytest.mark.parametrize(("kind", "text", "operands"), MISUSE)
def test_misuse_names_the_function_and_the_operand(kind: type[Exception], text: str, operands: tuple) -> None:
    for entry in ("scale_columns", "scale_columns_fwd"):
        with pytest.raises(kind, match=f"^{entry}: {text}"):
            getattr(api, entry)(*operands)


def test_the_opt_in_check_reads_the_operands() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    x[1, 2] = float("nan")
    assert api.scale_columns_fwd(x, weight).isnan().any()
    configure(cake_synthetic_check_finite=True)
    with pytest.raises(ValueError, match="x is not finite"):
        api.scale_columns_fwd(x, weight)


def test_operands_are_left_as_they_were() -> None:
    """Fault X06: bits and versions of the operands survive a forward and two backwards, which agree."""
    x, weight = torch.randn(70, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    dy = torch.randn(70, 8)
    before = [(t.detach().clone(), t._version) for t in (x, weight, dy)]
    y = api.scale_columns(x, weight)
    first, second = (torch.autograd.grad(y, (x, weight), dy, retain_graph=True) for _ in range(2))
    for got, want in zip(first, second, strict=True):
        assert_same_bits(got, want, "gradient")
    for tensor, (bits, version) in zip((x, weight, dy), before, strict=True):
        assert_same_bits(tensor.detach(), bits, "operand")
        assert tensor._version == version


def test_check_supported_answers_for_the_contract_and_for_one_backend() -> None:
    check_supported(65536)
    check_supported(3, arch="cpu")
    for columns in (0, 65537):
        with pytest.raises(ValueError, match="columns is"):
            check_supported(columns, arch="sm_90a")
    with pytest.raises(NotImplementedError, match="sm_103a"):
        check_supported(64, arch="sm_103a")
    with pytest.raises(TypeError, match="columns is True"):
        check_supported(True)
    assert is_supported(64)
    assert not is_supported(64, arch="sm_103a")


def test_fast_needs_no_scratch_and_det_one_row_per_chunk() -> None:
    assert plan.plan_backward(513, 8, 256, variant="fast", arch="sm_80").partial_bytes == 0
    assert plan.plan_backward(513, 8, 256, variant="det", arch="sm_80").partial_bytes == 3 * 8 * 4
