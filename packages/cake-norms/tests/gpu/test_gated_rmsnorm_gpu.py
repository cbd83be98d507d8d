"""``gated_rmsnorm`` on a CUDA device: accuracy over heads, gates and activations, bits, layouts, streams, graphs."""

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
from cake_core.testing.sanitizer import TOOLS, Runs, assert_clean, sanitized
from cake_norms.gated_rmsnorm import plan, rmsnorm_gate, rmsnorm_gate_bwd, rmsnorm_gate_fwd, rmsnorm_silu_gate
from cake_norms.gated_rmsnorm.testing import oracle
from cake_norms.gated_rmsnorm.testing.budgets import BUDGETS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]

HEADS = (1, 3, 12, 16, 32, 48, 64, 96)
TOKENS = (1, 7, 255, 32771)
# (heads, token stride of z): fused projections of real layers read in place; 12354 is copied.
GATES = ((32, 12352), (32, 12360), (4, 1544), (12, 4120), (32, 12354))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NAMES = ("y", "dx", "dz", "dweight")
CHUNK_ELEMENTS = 2**25  # of an FP64 reference at a time


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    configure(cake_gated_rmsnorm_variant="det")
    yield
    configure()
    gc.collect()
    torch.cuda.empty_cache()


def _randn(
    *shape: int, seed: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Normal values in pieces, so that a large tensor needs no FP32 copy of itself."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    values = torch.empty(shape, device=DEVICE, dtype=dtype)
    for piece in values.view(-1).split(2**28):
        piece.copy_(torch.randn(piece.shape, generator=generator, device=DEVICE).mul_(scale).add_(mean))
    return values


def _operands(
    tokens: int, heads: int, dim: int = 128, *, weight: str = "bf16"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, z, weight, dy; the gate reaches +-12, where it is saturated."""
    shape = (tokens, heads, dim)
    x, dy, z = _randn(*shape, seed=1), _randn(*shape, seed=2), _randn(*shape, seed=3, scale=3.0)
    return x, z, _randn(dim, seed=4, scale=0.25, mean=1.0, dtype=DTYPES[weight]), dy


def _columns(values: Tensor, stride: int, first: int) -> Tensor:
    """``values`` [tokens, heads, D] as columns of a NaN projection [tokens, stride]."""
    tokens, heads, dim = values.shape
    projection = torch.full((tokens, stride), math.nan, device=values.device, dtype=values.dtype)
    view = projection[:, first : first + heads * dim].view(tokens, heads, dim)
    return view.copy_(values)


def _run(x: Tensor, z: Tensor, w: Tensor, dy: Tensor, activation: str = "silu") -> dict[str, Tensor]:
    y = rmsnorm_gate_fwd(x, z, w, activation=activation)
    dx, dz, dweight = rmsnorm_gate_bwd(dy, x, z, w, activation=activation)
    assert dx is not None
    assert dz is not None
    assert dweight is not None
    return {"y": y, "dx": dx, "dz": dz, "dweight": dweight}


def _leaves(
    x: Tensor, z: Tensor, w: Tensor, needs: tuple[bool, bool, bool] = (True, True, True)
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies that collect gradients where ``needs`` says so."""
    return tuple(t.clone().requires_grad_(need) for t, need in zip((x, z, w), needs, strict=True))  # type: ignore[return-value]


def _assert_within(got: Tensor, want: Tensor, bound: Tensor, name: str) -> None:
    excess = (got.double() - want).abs() - bound
    assert bool((excess <= 0).all()), f"{name}: {float(excess.max()):.3e} over its elementwise bound"


def _assert_accurate(
    got: dict[str, Tensor], x: Tensor, z: Tensor, w: Tensor, dy: Tensor, where: str, activation: str = "silu"
) -> None:
    """Every output within its elementwise bound and its relative RMS budget."""
    dim = x.shape[-1]
    dweight, error = (torch.zeros(dim, device=x.device, dtype=torch.float64) for _ in range(2))
    step = max(1, CHUNK_ELEMENTS // (x.shape[1] * dim))
    for first in range(0, x.shape[0], step):
        part = slice(first, first + step)
        ref = oracle.reference(x[part], z[part], w, dy[part], activation=activation)
        bounds = ref.bounds(w.dtype)
        for name in ("y", "dx", "dz"):
            value, want = got[name][part], getattr(ref, name)
            _assert_within(value, want, bounds[name], f"{where} {name}")
            assert_rel_rms(value, want, BUDGETS[name].rel_rms, f"{where} {name}")
        dweight += ref.dweight
        error += ref.dweight_error
    _assert_within(got["dweight"], dweight, oracle.dweight_bound(dweight, error, w.dtype), f"{where} dweight")
    budget = BUDGETS["dweight_bf16" if w.dtype == torch.bfloat16 else "dweight"]
    assert_rel_rms(got["dweight"], dweight, budget.rel_rms, f"{where} dweight")


def _assert_same(got: dict[str, Tensor], want: dict[str, Tensor], where: str, names: tuple[str, ...] = NAMES) -> None:
    for name in names:
        assert_same_bits(got[name], want[name], f"{where}: {name}")


# ---- accuracy


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count_is_within_the_budgets_at_every_token_count(heads: int, weight: str) -> None:
    for tokens in TOKENS:
        x, z, w, dy = _operands(tokens, heads, weight=weight)
        _assert_accurate(_run(x, z, w, dy), x, z, w, dy, f"[{tokens}, {heads}, 128] {weight}")


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_head_dim_and_activation_is_within_the_budgets(dim: int, activation: str) -> None:
    for tokens, heads in ((1, 1), (255, 3), (1025, 12), (37, 96)):
        for weight in DTYPES:
            x, z, w, dy = _operands(tokens, heads, dim, weight=weight)
            where = f"[{tokens}, {heads}, {dim}] {activation} {weight}"
            _assert_accurate(_run(x, z, w, dy, activation), x, z, w, dy, where, activation)


def test_the_budget_refuses_a_norm_that_is_rounded_before_the_gate() -> None:
    """The two-rounding form of other implementations: BF16(n w), then BF16 of its product with silu(z)."""
    x, z, w, _ = _operands(255, 32)
    want = oracle.gated_rmsnorm(x, z, w, 1e-6)
    assert_rel_rms(rmsnorm_silu_gate(x, z, w), want, BUDGETS["y"].rel_rms, "y")
    n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    rounded = ((n * w.float()).bfloat16().float() * torch.nn.functional.silu(z.float())).bfloat16()
    with pytest.raises(AssertionError, match="over the budget"):
        assert_rel_rms(rounded, want, BUDGETS["y"].rel_rms, "two roundings")


def test_extreme_gates_and_broken_rows_stay_in_their_elements_and_rows() -> None:
    x, z, w, dy = _operands(16, 4)
    clean = _run(x, z, w, dy)
    hurt, gate = x.clone(), z.clone()
    hurt[2, 1, 7], hurt[5, 1] = math.nan, 0
    gate[9, 0, :6] = torch.tensor([-87.5, -1e4, -3e38, 50.0, math.inf, -math.inf])
    got = _run(hurt, gate, w, dy)
    touched = torch.zeros(16, 4, dtype=torch.bool, device=DEVICE)
    touched[2, 1] = touched[5, 1] = touched[9, 0] = True
    for name in ("y", "dx", "dz"):
        assert_same_bits(got[name][~touched], clean[name][~touched], name)
    assert bool(got["y"][2, 1].isnan().all())
    assert not bool(got["y"][5, 1].any())
    assert bool(got["dx"][5, 1].isfinite().all())
    extreme = got["y"][9, 0].float()
    assert bool((extreme[:3].abs() < 1e-35).all())
    assert bool(extreme[3].isfinite())
    assert not bool(extreme[4].isfinite())
    assert bool(extreme[5].isnan())
    assert_same_bits(got["y"][9, 0, 6:], clean["y"][9, 0, 6:], "the elements beside extreme gates")


# ---- bits


@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (3, 64), (32, 128), (12, 256)])
def test_a_row_keeps_its_bits_in_every_batch(heads: int, dim: int) -> None:
    x, z, w, dy = _operands(4097, heads, dim)
    whole = _run(x, z, w, dy)
    for tokens in (1, 2, 7, 255, 1055):
        part = _run(x[:tokens], z[:tokens], w, dy[:tokens])
        for name in ("y", "dx", "dz"):
            assert_same_bits(part[name], whole[name][:tokens], f"{name} of {tokens} tokens")
    for token, head in ((0, 0), (131, heads - 1), (4096, heads // 2)):
        alone = _run(x[token, head], z[token, head], w, dy[token, head])
        for name in ("y", "dx", "dz"):
            assert_same_bits(alone[name], whole[name][token, head], f"{name} of row [{token}, {head}]")
    order = torch.randperm(4097, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    shuffled = _run(x[order], z[order], w, dy[order])
    for name in ("y", "dx", "dz"):
        assert_same_bits(shuffled[name], whole[name][order], f"{name} of permuted tokens")


def test_every_repetition_has_the_same_bits() -> None:
    """Three runs in a row, fast as well, on a side stream, and a hundred of the smallest calls."""
    x, z, w, dy = _operands(4097, 32)
    first = _run(x, z, w, dy)
    for _ in range(2):
        _assert_same(_run(x, z, w, dy), first, "again")
    configure(cake_gated_rmsnorm_variant="fast")
    _assert_same(_run(x, z, w, dy), first, "fast", ("y", "dx", "dz"))
    configure(cake_gated_rmsnorm_variant="det")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = _run(x, z, w, dy)
    torch.cuda.current_stream().wait_stream(stream)
    _assert_same(aside, first, "side stream")
    for tokens in (1, 2, 3):
        part = slice(0, tokens)
        small = _run(x[part], z[part], w, dy[part])
        for _ in range(100):
            _assert_same(_run(x[part], z[part], w, dy[part]), small, f"{tokens} tokens")


def test_a_poisoned_pool_changes_no_bit() -> None:
    x, z, w, dy = _operands(4097, 32)
    want = _run(x, z, w, dy)
    configure(cake_gated_rmsnorm_variant="det", cake_workspace_pool_bytes=2**26)
    nbytes = plan.plan_backward(4097 * 32, 128).partial_bytes(128)
    assert nbytes > 0
    workspace.take("gated_rmsnorm", "partial", nbytes).fill_(0xFF)
    hits = workspace.stats()["hits"]
    _assert_same(_run(x, z, w, dy), want, "pool full of NaN")
    assert workspace.stats()["hits"] == hits + 1


def test_the_portable_library_has_the_bits_of_the_own_one() -> None:
    """The PTX of the sm_80 build, compiled by the driver for this device, against the device's own build."""
    x, z, w, dy = _operands(1057, 12)
    own = _run(x, z, w, dy)
    package = loader.kernel_package("gated_rmsnorm")
    package.build(("gated_rmsnorm_fwd_sm_80", "gated_rmsnorm_bwd_sm_80"))  # side by side
    p = plan.plan_backward(1057 * 12, 128)
    got = {name: torch.empty_like(value) for name, value in own.items()}
    partial = torch.empty(p.partial_rows, 128, device=DEVICE)
    package.function("gated_rmsnorm_fwd_sm_80")(got["y"], x, z, w, 1e-6, 0)
    package.function("gated_rmsnorm_bwd_sm_80")(
        got["dx"], got["dz"], got["dweight"], partial, dy, x, z, w, 1e-6, 0, p.partial_rows, p.waves
    )
    _assert_same(got, own, "portable")


# ---- layouts


@pytest.mark.parametrize(("heads", "stride"), GATES)
def test_the_gate_is_read_in_place_from_the_projection(heads: int, stride: int) -> None:
    """One output is allocated, and one copy where the stride is no multiple of 8."""
    for tokens in (7, 255):
        x, z, w, dy = _operands(tokens, heads)
        want = _run(x, z, w, dy)
        sliced = _columns(z, stride, 8)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        y = rmsnorm_silu_gate(x, sliced, w)
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert made == (1 if stride % 8 == 0 else 2), f"{made} allocations at a stride of {stride}"
        assert_same_bits(y, want["y"], "y")
        _assert_same(_run(x, sliced, w, dy), want, f"z at stride {stride}")


def test_every_operand_has_its_own_strides_and_dz_may_be_a_slice() -> None:
    tokens, heads, dim = 133, 12, 128
    x, z, w, dy = _operands(tokens, heads)
    want = _run(x, z, w, dy)
    strided_x = _columns(x, 1600, 24)
    strided_z = _columns(z, 4120, 2056)
    strided_dy = dy.transpose(0, 1).contiguous().transpose(0, 1)
    packed = torch.full((tokens, 4120), 7.0, device=DEVICE, dtype=torch.bfloat16)
    dz = packed[:, 2056 : 2056 + heads * dim].view(tokens, heads, dim)
    got = rmsnorm_gate_bwd(strided_dy, strided_x, strided_z, w, dz=dz)
    for name, value in zip(("dx", "dz", "dweight"), got, strict=True):
        assert value is not None
        assert_same_bits(value.contiguous(), want[name], name)
    assert bool((packed[:, :2056] == 7).all())
    assert bool((packed[:, 2056 + heads * dim :] == 7).all())
    assert_same_bits(rmsnorm_silu_gate(strided_x, strided_z, w), want["y"], "y")


def test_a_gradient_without_memory_of_its_own_has_the_bits_of_a_dense_one() -> None:
    x, z, w, _ = _operands(133, 12)
    dy = torch.ones((), device=DEVICE, dtype=torch.bfloat16).expand(133, 12, 128)
    _assert_same(_run(x, z, w, dy), _run(x, z, w, dy.contiguous()), "expanded dy")


def test_outputs_fill_what_the_caller_gave_and_nothing_around_it() -> None:
    x, z, w, dy = _operands(37, 5)
    want = _run(x, z, w, dy)
    got = {name: poisoned_empty(value.shape, value.dtype, DEVICE) for name, value in want.items()}
    rmsnorm_gate_fwd(x, z, w, out=got["y"])
    rmsnorm_gate_bwd(dy, x, z, w, dx=got["dx"], dz=got["dz"], dweight=got["dweight"])
    _assert_same(got, want, "given outputs")
    for name, value in got.items():
        assert_guards(value, name)


def test_the_gradient_of_a_bf16_weight_into_an_fp32_main_grad() -> None:
    """A main-grad slice of a flat buffer has the alignment of one element."""
    for tokens in (1, 1057):
        x, z, w, dy = _operands(tokens, 3)
        flat = torch.full((131,), math.nan, device=DEVICE)
        needs = (False, False, True)
        *_, dweight = rmsnorm_gate_bwd(dy, x, z, w, dweight=flat[1:129], needs=needs)
        *_, rounded = rmsnorm_gate_bwd(dy, x, z, w, needs=needs)
        assert dweight is not None
        assert rounded is not None
        assert_same_bits(dweight.bfloat16(), rounded, "dweight")
        assert bool(flat[[0, 129, 130]].isnan().all())


def test_offsets_past_two_to_the_31_reach_the_right_tokens() -> None:
    """Token stride times tokens above 2^31 elements: the gate inside a projection of [140000, 16480]."""
    tokens, heads, stride = 140_000, 4, 16480
    x, z, w, dy = _operands(tokens, heads)
    sliced = torch.empty(tokens, stride, device=DEVICE, dtype=torch.bfloat16)[:, 12288 : 12288 + heads * 128]
    sliced = sliced.view(tokens, heads, 128).copy_(z)
    got = _run(x, sliced, w, dy)
    tail = _run(x[-64:], z[-64:], w, dy[-64:])
    for name in ("y", "dx", "dz"):
        assert_same_bits(got[name][-64:], tail[name], f"last tokens of {name}")
    _assert_accurate(got, x, sliced, w, dy, "wide projection")


@pytest.mark.large
def test_more_than_two_to_the_31_elements() -> None:
    tokens, heads = 175_000, 96
    x, z, w, dy = _operands(tokens, heads, weight="fp32")
    assert x.numel() > 2**31
    got = _run(x, z, w, dy)
    tail = _run(x[-64:], z[-64:], w, dy[-64:])
    for name in ("y", "dx", "dz"):
        assert_same_bits(got[name][-64:], tail[name], f"last tokens of {name}")
    _assert_accurate(got, x, z, w, dy, f"[{tokens}, {heads}, 128]")


# ---- autograd, parallel layers, streams, graphs


def test_autograd_gives_what_the_functions_give_for_every_subset_of_gradients() -> None:
    x, z, w, dy = _operands(133, 12)
    want = _run(x, z, w, dy)
    for mask in range(1, 8):
        needs = (bool(mask & 1), bool(mask & 2), bool(mask & 4))
        leaves = _leaves(x, z, w, needs)
        operands = {"dy": dy, "x": leaves[0], "z": leaves[1], "w": leaves[2]}
        with assert_operands_untouched(operands, retains_grad=True):
            rmsnorm_silu_gate(*leaves).backward(dy)
        for need, leaf, name in zip(needs, leaves, ("dx", "dz", "dweight"), strict=True):
            assert (leaf.grad is not None) == need
            if leaf.grad is not None:
                assert_same_bits(leaf.grad, want[name], name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_call_replays_the_same_bits(reentrant: bool) -> None:
    x, z, w, dy = _operands(133, 12)
    want = _run(x, z, w, dy)
    leaves = _leaves(x, z, w)
    y = checkpoint(rmsnorm_silu_gate, *leaves, use_reentrant=reentrant)
    assert isinstance(y, Tensor)
    y.backward(dy)
    got = {"y": y.detach(), "dx": leaves[0].grad, "dz": leaves[1].grad, "dweight": leaves[2].grad}
    for name, value in got.items():
        assert value is not None
        assert_same_bits(value, want[name], name)


def test_heads_split_over_ranks_and_micro_batches_add_up_to_the_whole_layer() -> None:
    """dweight of a call covers its own heads and tokens: the sums over two ranks and three batches equal one call."""
    x, z, w, dy = _operands(3 * 700, 32, weight="fp32")
    want = oracle.reference(x, z, w, dy).dweight
    ranks = torch.zeros(128, device=DEVICE)
    for rank in range(2):
        own = slice(16 * rank, 16 * rank + 16)
        part = _run(x[:, own], z[:, own], w, dy[:, own])
        ranks += part["dweight"]
    assert_rel_rms(ranks, want, BUDGETS["dweight"].rel_rms, "dweight over ranks")
    leaf = w.clone().requires_grad_()
    for batch in range(3):
        own = slice(700 * batch, 700 * batch + 700)
        rmsnorm_silu_gate(x[own], z[own], leaf).backward(dy[own])
    assert leaf.grad is not None
    assert_rel_rms(leaf.grad, want, BUDGETS["dweight"].rel_rms, "dweight over micro-batches")


def test_no_call_waits_for_the_device() -> None:
    x, z, w, dy = _operands(133, 12)
    leaves = _leaves(x, z, w)
    rmsnorm_silu_gate(*leaves).backward(dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rmsnorm_silu_gate(*leaves).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_replays_on_new_contents() -> None:
    x, z, w, dy = _operands(1057, 32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(x, z, w, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _run(x, z, w, dy)
    for seed in (10, 20):
        for offset, operand in enumerate((x, z, dy)):
            operand.copy_(_randn(*operand.shape, seed=seed + offset))
        graph.replay()
        replayed = {name: value.clone() for name, value in captured.items()}
        _assert_same(replayed, _run(x, z, w, dy), f"replay {seed}")


def test_a_compiled_call_has_the_bits_of_the_eager_one() -> None:
    """Forward and backward in one graph without a break, for changing token counts."""
    compiled = torch.compile(rmsnorm_gate, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (133, 37, 1057):
        x, z, w, dy = _operands(tokens, 12)
        want = _run(x, z, w, dy, "sigmoid")
        leaves = _leaves(x, z, w)
        y = compiled(*leaves, activation="sigmoid")
        y.backward(dy)
        got = {"y": y.detach(), "dx": leaves[0].grad, "dz": leaves[1].grad, "dweight": leaves[2].grad}
        for name, value in got.items():
            assert value is not None
            assert_same_bits(value, want[name], f"{name} of {tokens} tokens")


def test_no_tokens_give_empty_results_and_a_zero_weight_gradient() -> None:
    x, z, w, dy = _operands(0, 12)
    got = _run(x, z, w, dy)
    assert got["y"].shape == got["dx"].shape == got["dz"].shape == (0, 12, 128)
    assert not bool(got["dweight"].any())


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_operands_of_another_device_than_the_current_one() -> None:
    """Nothing is allocated on the current device, whose allocator counts, and the bits are those of device 0."""
    x, z, w, dy = _operands(133, 12)
    want = _run(x, z, w, dy)
    moved = x.to("cuda:1"), z.to("cuda:1"), w.to("cuda:1"), dy.to("cuda:1")
    with nothing_allocated_on_the_current_device():
        got = _run(*moved)
    _assert_same({name: value.to("cuda:0") for name, value in got.items()}, want, "device 1")


_SANITIZED = """
import itertools
import torch
from cake_core.testing.sanitizer import edge
from cake_norms.gated_rmsnorm import plan, rmsnorm_gate_bwd, rmsnorm_gate_fwd

generator = torch.Generator().manual_seed(1)

def operand(tokens, heads, dim, pad):
    return edge(torch.randn(tokens, heads, dim, generator=generator).bfloat16(), pad, "cuda")

def finite(*outputs):
    assert all(bool(value.cpu().isfinite().all()) for value in outputs if value is not None)

seen = []
for tokens, heads, dim, weight, activation in (
    (37, 1, 128, torch.float32, "silu"),
    (37, 1, 128, torch.bfloat16, "sigmoid"),
    (1, 1, 64, torch.bfloat16, "silu"),
    (3, 3, 256, torch.float32, "sigmoid"),
    (700, 8, 128, torch.bfloat16, "silu"),
    (100, 3, 64, torch.float32, "sigmoid"),
    (61, 12, 256, torch.bfloat16, "silu"),
):
    x, z, dy = operand(tokens, heads, dim, 8), operand(tokens, heads, dim, 16), operand(tokens, heads, dim, 0)
    w = torch.rand(dim, generator=generator).to(weight).to("cuda")
    finite(rmsnorm_gate_fwd(x, z, w, activation=activation))
    every = tokens * heads <= 300
    for needs in itertools.product((True, False), repeat=3) if every else ((True, True, True), (False, False, True)):
        finite(*rmsnorm_gate_bwd(dy, x, z, w, activation=activation, needs=needs))
    seen.append(plan.plan_backward(tokens * heads, dim).partial_rows)
assert min(seen) == 1 and max(seen) > 32, seen
torch.cuda.synchronize()
print("done")
"""


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    _run(*_operands(1, 1))  # compiled before
    with sanitized(_SANITIZED, "rmsnorm") as runs:
        yield runs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on PATH")
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(runs: Runs, tool: str) -> None:
    """One CTA and many with their reduction, both weight dtypes and gates, every head dim and subset of gradients."""
    assert_clean(runs, tool)
