"""``rmsnorm`` on a CUDA device: accuracy over widths and row counts, bits, layouts, streams, graphs, memory."""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Iterator

import pytest
import torch
from cake_core import configure, loader, workspace
from cake_core.testing.det import nothing_allocated_on_the_current_device
from cake_core.testing.gates import (
    assert_guards,
    assert_operands_untouched,
    assert_rel_rms,
    assert_same_bits,
    poisoned_empty,
)
from cake_core.testing.sanitizer import TOOLS, Runs, assert_clean, assert_found, sanitized
from cake_norms.rmsnorm import (
    ZeroCenteredRMSNorm,
    plan,
    zero_centered_rmsnorm,
    zero_centered_rmsnorm_bwd,
    zero_centered_rmsnorm_fwd,
)
from cake_norms.rmsnorm.testing import oracle
from cake_norms.rmsnorm.testing.budgets import BUDGETS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]

WIDTHS = (
    8, 24, 128, 256, 264, 512, 1000, 1536, 2048, 2304, 2560, 2880, 4096, 5120, 5376, 6144, 7168, 8192, 8200, 12288,
    16384,
)  # fmt: skip
ROWS = (1, 2, 3, 31, 132, 133, 1055, 1057, 4097, 32771)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NAMES = ("y", "rstd", "dx", "dweight")
CHUNK_ELEMENTS = 2**25  # of an FP64 reference at a time


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    configure(cake_rmsnorm_variant="det")
    yield
    configure()
    gc.collect()
    torch.cuda.empty_cache()


def _randn(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values in pieces, so that a large tensor needs no FP32 copy of itself."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.empty(shape, device=DEVICE, dtype=dtype)
    for piece in values.view(-1).split(2**28):
        piece.copy_(torch.randn(piece.shape, generator=generator, device=DEVICE).mul_(scale))
    return values


def _run(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y, rstd = zero_centered_rmsnorm_fwd(x, w)
    dx, dweight = zero_centered_rmsnorm_bwd(dy, x, w, rstd)
    assert dx is not None
    assert dweight is not None
    return {"y": y, "rstd": rstd, "dx": dx, "dweight": dweight}


def _assert_within(got: Tensor, want: Tensor, bound: Tensor, name: str) -> None:
    excess = (got.double() - want).abs() - bound
    assert bool((excess <= 0).all()), f"{name}: {float(excess.max()):.3e} over its elementwise bound"


def _assert_accurate(got: dict[str, Tensor], x: Tensor, w: Tensor, dy: Tensor, where: str) -> None:
    """Every output within its elementwise bound and its relative RMS budget."""
    hidden = x.shape[-1]
    dweight, terms = (torch.zeros(hidden, device=x.device, dtype=torch.float64) for _ in range(2))
    step = max(1, CHUNK_ELEMENTS // hidden)
    for first in range(0, x.shape[0], step):
        part = slice(first, first + step)
        ref = oracle.reference(x[part], w, dy[part])
        bounds = ref.bounds(w.dtype)
        for name in ("y", "rstd", "dx"):
            value, want = got[name][part], getattr(ref, name)
            _assert_within(value, want, bounds[name], f"{where} {name}")
            assert_rel_rms(value, want, BUDGETS[name].rel_rms, f"{where} {name}")
        dweight += ref.dweight
        terms += ref.dweight_terms
    bf16 = w.dtype == torch.bfloat16
    bound = 2.0**-21 * terms + (2.0**-8 * dweight.abs() if bf16 else 0)
    _assert_within(got["dweight"], dweight, bound, f"{where} dweight")
    budget = BUDGETS["dweight_bf16" if bf16 else "dweight"]
    assert_rel_rms(got["dweight"], dweight, budget.rel_rms, f"{where} dweight")


def _assert_same(got: dict[str, Tensor], want: dict[str, Tensor], where: str, names: tuple[str, ...] = NAMES) -> None:
    for name in names:
        assert_same_bits(got[name], want[name], f"{where}: {name}")


# ---- accuracy


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_every_width_is_within_the_budgets_at_every_row_count(hidden: int, weight: str) -> None:
    w = _randn(hidden, seed=hidden, scale=0.25, dtype=DTYPES[weight])
    for rows in ROWS:
        x, dy = _randn(rows, hidden, seed=rows), _randn(rows, hidden, seed=rows + 1)
        _assert_accurate(_run(x, w, dy), x, w, dy, f"[{rows}, {hidden}] {weight}")


def test_a_weight_gradient_without_cancellation_is_summed_in_fp32_and_fp64() -> None:
    """Regression class: partial sums kept in BF16. All terms have one sign, so such a sum stops growing."""
    x = _randn(65536, 1024, seed=1).abs_()
    w, dy = torch.zeros(1024, device=DEVICE), torch.ones_like(x)
    _assert_accurate(_run(x, w, dy), x, w, dy, "one sign")


def test_the_budget_refuses_a_scale_rounded_to_bf16() -> None:
    """1 + w rounded to BF16 loses updates of the weight; the gate of y has to see it."""
    x, w = _randn(512, 2048, seed=1), _randn(2048, seed=2, scale=0.25)
    y, rstd = zero_centered_rmsnorm_fwd(x, w)
    want = oracle.rmsnorm(x, w, 1e-6)
    assert_rel_rms(y, want, BUDGETS["y"].rel_rms, "y")
    rounded = (x.float() * rstd[:, None] * (1 + w).float()).bfloat16()
    with pytest.raises(AssertionError, match="over the budget"):
        assert_rel_rms(rounded, want, BUDGETS["y"].rel_rms, "y with 1 + w in BF16")
    tiny = torch.full_like(w, 2.0**-9)
    assert not torch.equal(zero_centered_rmsnorm(x, tiny), zero_centered_rmsnorm(x, torch.zeros_like(w)))


def test_zero_rows_infinities_and_nan_stay_in_their_rows() -> None:
    x, dy, w = _randn(64, 1000, seed=1), _randn(64, 1000, seed=2), _randn(1000, seed=3)
    clean = _run(x, w, dy)
    hurt = x.clone()
    hurt[3, 7], hurt[10, 7] = math.nan, math.inf
    hurt[20] = 0
    hurt[30] = 1.8e19
    got = _run(hurt, w, dy)
    others = [row for row in range(64) if row not in (3, 10, 20, 30)]
    for name in ("y", "rstd", "dx"):
        assert_same_bits(got[name][others], clean[name][others], name)
    assert bool(got["y"][3].isnan().all())
    assert bool(got["y"][10, 7].isnan())
    assert not bool(got["y"][10, 8:].any())
    assert float(got["rstd"][10]) == 0
    assert not bool(got["y"][20].any())
    assert float(got["rstd"][20]) == pytest.approx(1e3, rel=1e-6)
    assert bool(got["dx"][20].isfinite().all())
    assert float(got["rstd"][30]) == 0, "the mean square overflows FP32"
    y = zero_centered_rmsnorm(torch.zeros(1, 64, device=DEVICE, dtype=torch.bfloat16), w[:64], 0.0)
    assert bool(y.isnan().all()), "a zero row with eps = 0"
    _, dweight = zero_centered_rmsnorm_bwd(torch.where(hurt.isnan(), math.nan, dy), x, w, clean["rstd"])
    assert dweight is not None
    assert dweight.isnan().nonzero().flatten().tolist() == [7], "a NaN of dy reaches its own column alone"


# ---- bits


@pytest.mark.parametrize("hidden", [8, 128, 264, 1000, 2048, 2880, 5120, 16384])
def test_a_row_keeps_its_bits_in_every_batch(hidden: int) -> None:
    x, dy, w = _randn(32771, hidden, seed=1), _randn(32771, hidden, seed=2), _randn(hidden, seed=3)
    whole = _run(x, w, dy)
    for rows in ROWS:
        part = _run(x[:rows], w, dy[:rows])
        for name in ("y", "rstd", "dx"):
            assert_same_bits(part[name], whole[name][:rows], f"{name} of {rows} rows")
    for row in (0, 1, 132, 32770):
        alone = _run(x[row], w, dy[row])
        for name in ("y", "rstd", "dx"):
            assert_same_bits(alone[name], whole[name][row], f"{name} of row {row}")
    order = torch.randperm(4097, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    shuffled = _run(x[order], w, dy[order])
    for name in ("y", "rstd", "dx"):
        assert_same_bits(shuffled[name], whole[name][order], f"{name} of permuted rows")


@pytest.mark.parametrize("hidden", [8, 256, 2048, 2304, 16384])
def test_every_repetition_has_the_same_bits(hidden: int) -> None:
    """Three runs in a row, fast as well, on a side stream, and a hundred of the smallest calls."""
    x, dy, w = _randn(4097, hidden, seed=1), _randn(4097, hidden, seed=2), _randn(hidden, seed=3)
    first = _run(x, w, dy)
    for _ in range(2):
        _assert_same(_run(x, w, dy), first, "again")
    configure(cake_rmsnorm_variant="fast")
    _assert_same(_run(x, w, dy), first, "fast", ("y", "rstd", "dx"))
    configure(cake_rmsnorm_variant="det")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = _run(x, w, dy)
    torch.cuda.current_stream().wait_stream(stream)
    _assert_same(aside, first, "side stream")
    for rows in (1, 2, 3):
        small = _run(x[:rows], w, dy[:rows])
        for _ in range(100):
            _assert_same(_run(x[:rows], w, dy[:rows]), small, f"{rows} rows")


def test_a_poisoned_pool_changes_no_bit() -> None:
    x, dy, w = _randn(4097, 2048, seed=1), _randn(4097, 2048, seed=2), _randn(2048, seed=3)
    want = _run(x, w, dy)
    configure(cake_rmsnorm_variant="det", cake_workspace_pool_bytes=2**28)
    nbytes = plan.plan_backward(4097, 2048).partial_bytes(2048)
    assert nbytes > 0
    workspace.take("rmsnorm", "partial", nbytes).fill_(0xFF)
    hits = workspace.stats()["hits"]
    _assert_same(_run(x, w, dy), want, "pool full of NaN")
    assert workspace.stats()["hits"] == hits + 1


def test_the_portable_library_has_the_bits_of_the_own_one() -> None:
    """The PTX of the sm_80 build, compiled by the driver for this device, against the device's own build."""
    x, dy, w = _randn(1057, 2880, seed=1), _randn(1057, 2880, seed=2), _randn(2880, seed=3)
    own = _run(x, w, dy)
    package = loader.kernel_package("rmsnorm")
    package.build(("rmsnorm_fwd_sm_80", "rmsnorm_bwd_sm_80"))  # side by side
    p = plan.plan_backward(1057, 2880)
    y, dx, rstd, dw = (torch.empty_like(own[name]) for name in ("y", "dx", "rstd", "dweight"))
    partial = torch.empty(p.partial_rows, 2880, device=DEVICE)
    package.function("rmsnorm_fwd_sm_80")(y, rstd, x, w, 1e-6, p.vectors, p.threads_per_row)
    package.function("rmsnorm_bwd_sm_80")(
        dx, dw, partial, dy, x, w, rstd, p.vectors, p.threads_per_row, p.row_groups, p.partial_rows, p.waves
    )
    _assert_same({"y": y, "rstd": rstd, "dx": dx, "dweight": dw}, own, "portable")


# ---- layouts


def test_strided_operands_are_read_in_place_and_others_copied_once() -> None:
    rows, hidden = 133, 1000
    x, dy, w = _randn(rows, hidden, seed=1), _randn(rows, hidden, seed=2), _randn(hidden, seed=3)
    want = _run(x, w, dy)

    def allocations(value: Tensor) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        y, _ = zero_centered_rmsnorm_fwd(value, w)
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert_same_bits(y, want["y"], f"y of strides {value.stride()}")
        return made

    for columns, first, copies in ((1016, 8, 0), (1016, 16, 0), (1004, 4, 1), (1016, 4, 1)):
        wide = torch.full((rows, columns), math.nan, device=DEVICE, dtype=torch.bfloat16)
        value = wide[:, first : first + hidden]
        value.copy_(x)
        assert allocations(value) == 2 + copies, f"[{rows}, {hidden}] at column {first} of {columns}"
    assert allocations(x.t().contiguous().t()) == 3
    y, _ = zero_centered_rmsnorm_fwd(x[:132].view(2, 6, 11, hidden), w)
    assert_same_bits(y.view(132, hidden), want["y"][:132], "4-D")


def test_every_layout_of_the_gradient_has_the_bits_of_a_dense_one() -> None:
    rows, hidden = 133, 512
    x, w = _randn(rows, hidden, seed=1), _randn(hidden, seed=3)
    _, rstd = zero_centered_rmsnorm_fwd(x, w)
    wide = torch.full((rows, hidden + 24), math.nan, device=DEVICE, dtype=torch.bfloat16)
    wide[:, 8 : 8 + hidden] = _randn(rows, hidden, seed=2)
    misaligned = torch.zeros_like(wide)[:, 4 : 4 + hidden].copy_(wide[:, 8 : 8 + hidden])
    for name, dy in (
        ("expanded", torch.ones((), device=DEVICE, dtype=torch.bfloat16).expand(rows, hidden)),
        ("one row for all", _randn(1, hidden, seed=4).expand(rows, hidden)),
        ("transposed", _randn(hidden, rows, seed=5).t()),
        ("column slice", wide[:, 8 : 8 + hidden]),
        ("misaligned column slice", misaligned),
    ):
        got = zero_centered_rmsnorm_bwd(dy, x, w, rstd)
        want = zero_centered_rmsnorm_bwd(dy.contiguous(), x, w, rstd)
        for output, value, expected in zip(("dx", "dweight"), got, want, strict=True):
            assert value is not None
            assert expected is not None
            assert_same_bits(value, expected, f"{output}, dy {name}")


def test_outputs_fill_what_the_caller_gave_and_nothing_around_it() -> None:
    rows, hidden = 37, 1000
    x, dy, w = _randn(rows, hidden, seed=1), _randn(rows, hidden, seed=2), _randn(hidden, seed=3)
    want = _run(x, w, dy)
    got = {
        "y": poisoned_empty((rows, hidden), torch.bfloat16, DEVICE),
        "rstd": poisoned_empty((rows,), torch.float32, DEVICE),
        "dx": poisoned_empty((rows, hidden), torch.bfloat16, DEVICE),
        "dweight": poisoned_empty((hidden,), torch.bfloat16, DEVICE),
    }
    zero_centered_rmsnorm_fwd(x, w, out=got["y"], rstd=got["rstd"])
    zero_centered_rmsnorm_bwd(dy, x, w, got["rstd"], dx=got["dx"], dweight=got["dweight"])
    _assert_same(got, want, "given outputs")
    for name, value in got.items():
        assert_guards(value, name)
    wide = torch.full((rows, 1024), 7.0, device=DEVICE, dtype=torch.bfloat16)
    zero_centered_rmsnorm_fwd(x, w, out=wide[:, 8 : 8 + hidden])
    assert_same_bits(wide[:, 8 : 8 + hidden], want["y"], "y into columns")
    assert bool((wide[:, :8] == 7).all())
    assert bool((wide[:, 8 + hidden :] == 7).all())


def test_the_gradient_of_a_bf16_weight_into_an_fp32_main_grad() -> None:
    """A main-grad slice of a flat buffer has the alignment of one element."""
    for rows in (3, 1057):
        x, dy, w = _randn(rows, 1000, seed=1), _randn(rows, 1000, seed=2), _randn(1000, seed=3)
        _, rstd = zero_centered_rmsnorm_fwd(x, w)
        flat = torch.full((1003,), math.nan, device=DEVICE)
        _, dweight = zero_centered_rmsnorm_bwd(dy, x, w, rstd, dweight=flat[1:1001], needs=(False, True))
        _, rounded = zero_centered_rmsnorm_bwd(dy, x, w, rstd, needs=(False, True))
        assert dweight is not None
        assert rounded is not None
        assert_same_bits(dweight.bfloat16(), rounded, "dweight")
        assert bool(flat[[0, 1001, 1002]].isnan().all())


def test_offsets_past_two_to_the_31_reach_the_right_rows() -> None:
    """Row stride times rows above 2^31 elements: a 2048-column slice of [140000, 16480]."""
    rows, hidden, stride = 140_000, 2048, 16480
    wide = torch.empty(rows, stride, device=DEVICE, dtype=torch.bfloat16)
    x = wide[:, stride - hidden :]
    x.copy_(_randn(rows, hidden, seed=1))
    w, dy = _randn(hidden, seed=2), _randn(rows, hidden, seed=3)
    got = _run(x, w, dy)
    tail = _run(x[-64:].contiguous(), w, dy[-64:])
    for name in ("y", "rstd", "dx"):
        assert_same_bits(got[name][-64:], tail[name], f"last rows of {name}")
    _assert_accurate(got, x, w, dy, "wide view")


@pytest.mark.large
@pytest.mark.parametrize(("rows", "hidden"), [(8_400_000, 256), (419_431, 5120)])
def test_more_than_two_to_the_31_elements(rows: int, hidden: int) -> None:
    """N01: 32-bit element offsets wrap just above 2^31."""
    x, dy, w = _randn(rows, hidden, seed=1), _randn(rows, hidden, seed=2), _randn(hidden, seed=3).float()
    got = _run(x, w, dy)
    tail = _run(x[-64:], w, dy[-64:])
    for name in ("y", "rstd", "dx"):
        assert_same_bits(got[name][-64:], tail[name], f"last rows of {name}")
    _assert_accurate(got, x, w, dy, f"[{rows}, {hidden}]")


# ---- autograd, streams, graphs


def test_autograd_gives_what_the_functions_give_and_leaves_dy_alone() -> None:
    x, dy, w = _randn(133, 1000, seed=1), _randn(133, 1000, seed=2), _randn(1000, seed=3)
    want = _run(x, w, dy)
    for needs in ((True, True), (True, False), (False, True)):
        leaves = x.clone().requires_grad_(needs[0]), w.clone().requires_grad_(needs[1])
        with assert_operands_untouched({"dy": dy, "x": leaves[0], "w": leaves[1]}, retains_grad=True):
            zero_centered_rmsnorm(*leaves).backward(dy)
        for need, leaf, name in zip(needs, leaves, ("dx", "dweight"), strict=True):
            assert (leaf.grad is not None) == need
            if leaf.grad is not None:
                assert_same_bits(leaf.grad, want[name], name)
    shared = x.clone().requires_grad_()
    residual = x.clone().requires_grad_()
    (zero_centered_rmsnorm(shared, w) + residual).backward(dy)
    assert residual.grad is not None
    assert_same_bits(residual.grad, dy, "a dy with two consumers")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layer_replays_the_same_bits(reentrant: bool) -> None:
    x, dy, w = _randn(133, 2048, seed=1), _randn(133, 2048, seed=2), _randn(2048, seed=3)
    want = _run(x, w, dy)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = checkpoint(zero_centered_rmsnorm, *leaves, use_reentrant=reentrant)
    assert isinstance(y, Tensor)
    y.backward(dy)
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert_same_bits(y.detach(), want["y"], "y")
    assert_same_bits(leaves[0].grad, want["dx"], "dx")
    assert_same_bits(leaves[1].grad, want["dweight"], "dweight")


def test_micro_batches_accumulate_to_the_whole_batch() -> None:
    rows, hidden = 3 * 700, 2304
    x, dy, w = _randn(rows, hidden, seed=1), _randn(rows, hidden, seed=2), _randn(hidden, seed=3).float()
    layer = ZeroCenteredRMSNorm(hidden, device=DEVICE, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.copy_(w)
    for part in range(3):
        rows_of = slice(700 * part, 700 * (part + 1))
        layer(x[rows_of]).backward(dy[rows_of])
    assert layer.weight.grad is not None
    want = oracle.reference(x, w, dy).dweight
    assert_rel_rms(layer.weight.grad, want, BUDGETS["dweight"].rel_rms, "accumulated dweight")


def test_no_call_waits_for_the_device() -> None:
    x, w = _randn(133, 1000, seed=1).requires_grad_(), _randn(1000, seed=2).requires_grad_()
    dy = _randn(133, 1000, seed=3)
    zero_centered_rmsnorm(x, w).backward(dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        zero_centered_rmsnorm(x, w).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_replays_on_new_contents() -> None:
    x, dy, w = _randn(1057, 2048, seed=1), _randn(1057, 2048, seed=2), _randn(2048, seed=3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(x, w, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _run(x, w, dy)
    for seed in (10, 20):
        x.copy_(_randn(1057, 2048, seed=seed))
        dy.copy_(_randn(1057, 2048, seed=seed + 1))
        graph.replay()
        replayed = {name: value.clone() for name, value in captured.items()}
        _assert_same(replayed, _run(x, w, dy), f"replay {seed}")


def test_a_compiled_call_has_the_bits_of_the_eager_one() -> None:
    """Forward and backward in one graph without a break, and one compilation for every row count."""
    w = _randn(1000, seed=3)
    compiled = torch.compile(zero_centered_rmsnorm, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (133, 37, 1057):
        x, dy = _randn(rows, 1000, seed=rows), _randn(rows, 1000, seed=rows + 1)
        want = _run(x, w, dy)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = compiled(*leaves)
        y.backward(dy)
        got = {"y": y.detach(), "dx": leaves[0].grad, "dweight": leaves[1].grad}
        for name, value in got.items():
            assert value is not None
            assert_same_bits(value, want[name], f"{name} of {rows} rows")


def test_no_rows_give_empty_results_and_a_zero_weight_gradient() -> None:
    x, w = torch.empty(0, 2048, device=DEVICE, dtype=torch.bfloat16), _randn(2048, seed=1)
    got = _run(x, w, x)
    assert got["y"].shape == got["dx"].shape == (0, 2048)
    assert got["rstd"].shape == (0,)
    assert not bool(got["dweight"].any())


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_operands_of_another_device_than_the_current_one() -> None:
    """Nothing is allocated on the current device, whose allocator counts, and the bits are those of device 0."""
    x, dy, w = _randn(133, 1000, seed=1), _randn(133, 1000, seed=2), _randn(1000, seed=3)
    want = _run(x, w, dy)
    moved = x.to("cuda:1"), w.to("cuda:1"), dy.to("cuda:1")
    with nothing_allocated_on_the_current_device():
        got = _run(*moved)
    _assert_same({name: value.to("cuda:0") for name, value in got.items()}, want, "device 1")


_SANITIZED = """
import torch
from cake_core.testing.sanitizer import edge
from cake_norms.rmsnorm import plan, zero_centered_rmsnorm_bwd, zero_centered_rmsnorm_fwd

generator = torch.Generator().manual_seed(1)

def operand(rows, hidden, pad):
    return edge(torch.randn(rows, hidden, generator=generator).bfloat16(), pad, "cuda")

def finite(*outputs):
    assert all(bool(value.cpu().isfinite().all()) for value in outputs if value is not None)

seen = []
for rows, hidden, weight in (
    (37, 1000, torch.float32),
    (3, 1000, torch.bfloat16),
    (1, 8, torch.bfloat16),
    (300, 24, torch.float32),
    (70, 264, torch.bfloat16),
    (37, 1536, torch.float32),
    (37, 2880, torch.bfloat16),
    (300, 2560, torch.float32),
    (9, 9216, torch.bfloat16),
    (1100, 256, torch.bfloat16),
    (5, 16384, torch.bfloat16),
):
    x, dy = operand(rows, hidden, 8), operand(rows, hidden, 16)
    w = torch.rand(hidden, generator=generator).to(weight).to("cuda")
    y, rstd = zero_centered_rmsnorm_fwd(x, w)
    finite(y, rstd)
    for needs in ((True, True), (True, False), (False, True)):
        finite(*zero_centered_rmsnorm_bwd(dy, x, w, rstd, needs=needs))
    seen.append(plan.plan_backward(rows, hidden).partial_rows)
assert min(seen) == 1 and max(seen) > 32, seen
torch.cuda.synchronize()
print("done")
"""
# A read of 16 bytes behind the operand (torch itself makes no such view), and a read of what nobody wrote.
_PLANTED = """
import torch
from cake_norms.rmsnorm import zero_centered_rmsnorm_fwd
w = torch.zeros(1000).to("cuda")
x = torch.zeros(37, 1000, dtype=torch.bfloat16).to("cuda")
class Behind:
    __cuda_array_interface__ = {
        "shape": (37, 1000), "typestr": "<i2", "data": (x.data_ptr() + 16, False), "version": 2
    }
FAULT
zero_centered_rmsnorm_fwd(x, w)
torch.cuda.synchronize()
"""
_FAULTS = {
    "memcheck": "x = torch.as_tensor(Behind(), device='cuda').view(torch.bfloat16)",
    "initcheck": "x = torch.empty(37, 1000, dtype=torch.bfloat16, device='cuda')",
}


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    zero_centered_rmsnorm_fwd(_randn(1, 1000, seed=1), torch.zeros(1000, device=DEVICE))  # compiled before
    planted = {tool: _PLANTED.replace("FAULT", fault) for tool, fault in _FAULTS.items()}
    with sanitized(_SANITIZED, "rmsnorm", planted) as runs:
        yield runs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on PATH")
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(runs: Runs, tool: str) -> None:
    """One CTA and many with their reduction, both weight dtypes, every kind of lane and subset of gradients."""
    assert_clean(runs, tool)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on PATH")
@pytest.mark.parametrize(
    ("tool", "text"), [("memcheck", "Invalid __global__ read"), ("initcheck", "Uninitialized __global__ memory read")]
)
def test_the_sanitizer_finds_a_planted_fault(runs: Runs, tool: str, text: str) -> None:
    """What the other test relies on."""
    assert_found(runs, f"planted {tool}", text, "rmsnorm_fwd")
