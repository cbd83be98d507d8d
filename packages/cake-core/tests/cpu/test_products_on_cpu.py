"""Tensor cores in the CUDA emulation: what its products are, and which faults of a kernel it shows."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from cake_core.testing.cuda_on_cpu.emulation import Program, compile_program, randn
from torch import Tensor

CSRC = Path(__file__).parent / "products"
SUM, ROWS, TURNS, BOX_ROWS = 128, 64, 6, 40
SEEDS = range(6)


def _enum(name: str) -> dict[str, int]:
    """The enum of products.h without its k: the kernels and this file cannot disagree about a number."""
    text = re.sub(r"//.*", "", (CSRC / "products.h").read_text())
    body = re.search(rf"enum {name} {{(.*?)}}", text, re.S)
    assert body is not None
    return {word: value for value, word in enumerate(re.findall(r"k(\w+)", body[1]))}


FAULTS, PROGRAMS = _enum("Fault"), _enum("Program")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(compile_program(CSRC, "products", tmp_path_factory.mktemp("products")))


def run(
    program: Program,
    a: Tensor,
    b: Tensor,
    kernel: str = "Product",
    fault: str = "None",
    *,
    a_columns: bool = False,
    b_columns: bool = False,
    registers: bool = False,
    seed: int = 0,
) -> Tensor:
    """a b^T, 64 rows of a for each warpgroup."""
    out = torch.full((a.shape[0], b.shape[0]), -99.0)
    how = [b.shape[0], a_columns, b_columns, registers, a.shape[0] // ROWS]
    program.shuffle_lanes(seed)
    program.run(out, a, b, PROGRAMS[kernel], FAULTS[fault], [int(value) for value in how])
    return out


def reference(a: Tensor, b: Tensor, times: int = 1, k: int = 16) -> Tensor:
    """Exact within a step of ``k``, then rounded to FP32."""
    left, right = (x.double().unflatten(1, (-1, k)).transpose(0, 1) for x in (a, b))
    total = torch.zeros(a.shape[0], b.shape[0])
    for step in (left @ right.mT).repeat(times, 1, 1):
        total = (total.double() + step).float()
    return total


def operands(rows: int = ROWS, columns: int = 64, k: int = SUM) -> tuple[Tensor, Tensor]:
    return randn(rows, k, seed=1), randn(columns, k, seed=2)


def outcome(
    program: Program, kernel: str, fault: str, seed: int, *, b_columns: bool = False, registers: bool = False
) -> str:
    """The launch's error, "wrong" or "right"."""
    shapes = {"Product": (64, 128, SUM), "Pipeline": (64, 64, SUM), "Warp": (16, 16, SUM), "Tf32": (16, 16, SUM)} | {
        "Blocks": (64, 64, SUM),
        "Boxes": (64, 64, SUM),
    }
    a, b = operands(*shapes.get(kernel, (64, 64, 64 * TURNS)))
    want = reference(a, b, k=8 if kernel == "Tf32" else 16)
    if kernel == "Boxes":
        want[BOX_ROWS:] = 0.0
    if kernel == "Pipeline":
        want += reference(a[:, SUM // 2 :], b[:, SUM // 2 :])
    try:
        got = run(program, a, b, kernel, fault, b_columns=b_columns, registers=registers, seed=seed)
    except RuntimeError as error:
        return str(error)
    return "right" if torch.equal(got, want) else "wrong"


@pytest.mark.parametrize(("columns", "warpgroups"), [(64, 1), (128, 1), (128, 4)])
@pytest.mark.parametrize(
    ("a_columns", "b_columns", "registers"),
    [*product((False, True), (False, True), (False,)), (False, False, True), (False, True, True)],
)
def test_products_of_a_warpgroup(
    program: Program, columns: int, warpgroups: int, a_columns: bool, b_columns: bool, registers: bool
) -> None:
    """Both operands along rows and along columns, a from registers, for any order of the lanes: the same bits."""
    a, b = operands(ROWS * warpgroups, columns)
    want = reference(a, b)
    for seed in SEEDS[: 2 if warpgroups > 1 else None]:
        got = run(program, a, b, a_columns=a_columns, b_columns=b_columns, registers=registers, seed=seed)
        assert torch.equal(got, want)


def test_products_of_80_columns(program: Program) -> None:
    a, b = operands(2 * ROWS, 80)
    assert torch.equal(run(program, a, b), reference(a, b))


def test_two_products_of_one_group_add_up(program: Program) -> None:
    a, b = operands()
    assert torch.equal(run(program, a, b, "Twice"), reference(a, b, times=2))


def test_a_wait_leaves_the_youngest_groups(program: Program) -> None:
    assert {outcome(program, "Pipeline", "None", seed) for seed in SEEDS} == {"right"}
    for seed in SEEDS:
        assert "settled before the wgmma_wait" in outcome(program, "Pipeline", "SettlesEarly", seed)


@pytest.mark.parametrize("kernel", ["NamedRelay", "MbarrierRelay"])
def test_a_warpgroup_hands_tiles_to_another(program: Program, kernel: str) -> None:
    assert {outcome(program, kernel, "None", seed) for seed in SEEDS} == {"right"}


@pytest.mark.parametrize("b_columns", [False, True])
def test_products_of_a_warp(program: Program, b_columns: bool) -> None:
    assert {outcome(program, "Warp", "None", seed, b_columns=b_columns) for seed in SEEDS} == {"right"}


def test_tf32_products_of_a_warp(program: Program) -> None:
    assert {outcome(program, "Tf32", "None", seed) for seed in SEEDS} == {"right"}
    assert NEVER in outcome(program, "Tf32", "LaneMissing", 0)


SOMETIMES = ("CountOfBoth", "TakesEarly", "ParityOfFull")  # some orders of the lanes hide them
NOT_FENCED = "without a fence_proxy_async"
NEVER = "the others never reach"


@pytest.mark.parametrize(
    ("fault", "text", "registers"),
    [
        ("NoProxyFence", NOT_FENCED, False),
        ("NoRegisterFence", "without a wgmma_fence", False),
        ("NoRegisterFence", "without a wgmma_fence", True),
        ("NoCommit", "before the wgmma_wait that ends their product", False),
        ("NoWait", "ends before a wgmma_wait has ended its products", False),
        ("SettlesEarly", "before the wgmma_wait that ends their product", False),
        ("OverwritesEarly", "while a product reads it", False),
        ("OverwritesAndFences", "while a product reads it", False),
        ("WritesSums", "sums are written before", False),
        ("WritesBehindFence", "written after the wgmma_fence", True),
        ("LaneMissing", "the lanes of a warp commit different products", False),
        ("WarpMissing", "not asked for all products of its warpgroup", False),
        ("WarpDiffers", "warps of a warpgroup ask for different products", False),
        ("Misaligned", "does not start at a multiple of 1024 bytes", False),
        ("InsideAGroup", "does not start at a multiple of 1024 bytes", False),
        ("BehindTheEnd", "behind the end of the dynamic shared memory", False),
        ("NoSwizzle", "not one of 128-byte swizzle", False),
        ("Outside", "not in the dynamic shared memory", False),
    ],
)
def test_a_fault_that_every_order_of_the_lanes_shows(program: Program, fault: str, text: str, registers: bool) -> None:
    for seed in SEEDS[:3]:
        assert text in outcome(program, "Product", fault, seed, registers=registers)


@pytest.mark.parametrize("fault", ["NoBarrier", "OverwritesBehindWait"])
def test_the_warps_of_a_warpgroup_need_barriers(program: Program, fault: str) -> None:
    """Before a tile is read and before it is overwritten: each warp reads b at its own time."""
    seen = {outcome(program, "Product", fault, seed) for seed in SEEDS}
    assert any("while a product reads it" in each or NOT_FENCED in each or each == "wrong" for each in seen)


def test_sums_that_are_not_settled_are_nan(program: Program) -> None:
    a, b = operands()
    assert bool(run(program, a, b, fault="NoSettle").isnan().all())


@pytest.mark.parametrize(
    ("kernel", "fault", "text"),
    [
        ("NamedRelay", "NoProxyFence", NOT_FENCED),
        ("NamedRelay", "Count", "in different intrinsics"),
        ("NamedRelay", "CountOfBoth", f"{NEVER}|left half arrived|{NOT_FENCED}|reads it|wrong"),
        ("NamedRelay", "OneArrivalLess", NEVER),
        ("NamedRelay", "TakesEarly", f"{NOT_FENCED}|reads it|wrong|{NEVER}|left half arrived"),
        ("MbarrierRelay", "NoProxyFence", NOT_FENCED),
        ("MbarrierRelay", "ParityOfFull", f"{NOT_FENCED}|reads it|wrong|{NEVER}"),
        ("MbarrierRelay", "ParityOfEmpty", NEVER),
        ("MbarrierRelay", "OneArrivalLess", NEVER),
        ("MbarrierRelay", "NoInit", "before it is initialized"),
    ],
)
def test_a_fault_between_two_warpgroups(program: Program, kernel: str, fault: str, text: str) -> None:
    seen = [outcome(program, kernel, fault, seed) for seed in SEEDS]
    found = [each for each in seen if re.search(text, each)]
    assert len(found) == len(seen) or (fault in SOMETIMES and found)


def test_an_mbarrier_that_others_may_not_see_yet(program: Program) -> None:
    seen = [outcome(program, "MbarrierRelay", "NoBarrier", seed) for seed in SEEDS]
    assert any("before it is initialized" in each for each in seen)


def test_blocks_come_and_leave(program: Program) -> None:
    """Bulk copies: one thread starts them, an mbarrier counts what has come, a wait says what has been read."""
    assert {outcome(program, "Blocks", "None", seed) for seed in SEEDS} == {"right"}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("TakesEarly", "wrong"),
        ("NoProxyFence", NOT_FENCED),
        ("OverwritesEarly", "before the bulk_wait_read"),
        ("NoWait", "ends while a bulk store reads its memory"),
        ("OneArrivalLess", NEVER),
        ("Misaligned", "is not aligned to 16 bytes"),
        ("BehindTheEnd", "behind the end of the dynamic shared memory"),
    ],
)
def test_faults_of_blocks(program: Program, fault: str, text: str) -> None:
    seen = [outcome(program, "Blocks", fault, seed) for seed in SEEDS]
    assert all(text in each for each in seen) or (fault == "TakesEarly" and text in seen)


def test_boxes_of_tensors_come(program: Program) -> None:
    """Swizzled as products read them, zeros behind the last row, whichever comes first."""
    assert {outcome(program, "Boxes", "None", seed) for seed in SEEDS} == {"right"}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("TakesEarly", f"{NOT_FENCED}|reads it|wrong"),
        ("NextTooEarly", "while a product reads it"),
        ("OneArrivalLess", NEVER),
        ("Misaligned", "is not aligned"),
        ("BehindTheEnd", "behind the end of the dynamic shared memory"),
        ("Bytes", "another size than its barrier expects"),
        ("Matrix", "not inside of its tensor"),
    ],
)
def test_faults_of_boxes(program: Program, fault: str, text: str) -> None:
    seen = [outcome(program, "Boxes", fault, seed) for seed in SEEDS]
    found = [each for each in seen if re.search(text, each)]
    assert len(found) == len(seen) or (fault in ("TakesEarly", "NextTooEarly") and found)


@pytest.mark.parametrize(
    ("fault", "text"), [("NoBarrier", "wrong"), ("LaneMissing", NEVER), ("Misaligned", "is not aligned")]
)
def test_faults_of_a_warp(program: Program, fault: str, text: str) -> None:
    seen = [outcome(program, "Warp", fault, seed) for seed in SEEDS]
    assert any(text in each for each in seen)
    assert fault == "NoBarrier" or "right" not in seen
