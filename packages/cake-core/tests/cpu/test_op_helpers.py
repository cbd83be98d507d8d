"""What ops share beyond the runtime: layouts of wrappers, numbers and names of test operands. The ops test the rest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cake_core import cpu_math, layout, operands
from cake_core.testing.operands import bf16_ulp, budget_name, normal
from torch import Tensor


@pytest.mark.parametrize("view", [layout.rows, layout.heads, layout.vector])
def test_the_result_of_a_running_collective_is_copied(view: Callable[[Tensor], Tensor]) -> None:
    """Its own address is 0, which is aligned: a kernel would read the null page."""
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    value = torch.ones(64 if view is layout.vector else (4, 2, 64), dtype=torch.bfloat16)
    assert collectives.AsyncCollectiveTensor(value).data_ptr() == 0
    got = view(collectives.AsyncCollectiveTensor(value))
    assert type(got) is Tensor
    assert got.data_ptr() != 0
    assert torch.equal(got.reshape(value.shape), value)


def test_a_wrapper_that_cannot_be_copied_into_memory_is_refused() -> None:
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    value = torch.ones(4, 64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="a TwoTensor without memory of its own"):
        layout.rows(two_tensor.TwoTensor(value, value))


def test_an_ordinary_call_has_a_home() -> None:
    """Only plain tensors of one device outside of transforms: such a call needs no further look at its operands."""
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    x = torch.ones(4, 8)
    assert operands.ordinary_home((x, torch.nn.Parameter(x), x[0].t())) == ("cpu", None)
    assert operands.ordinary_home((x.to("meta"),)) == ("meta", None)
    odd = (None, 3, x.to_sparse(), x.to("meta"), two_tensor.TwoTensor(x, x))
    assert [operands.ordinary_home((x, value)) for value in odd] == [None] * len(odd)
    assert operands.ordinary_home(()) is None
    seen: list[object] = []

    def look(value: Tensor) -> Tensor:
        seen.append(operands.ordinary_home((value,)))
        return value.sum()

    torch.func.grad(look)(x)
    with torch.autograd.forward_ad.dual_level():
        look(torch.autograd.forward_ad.make_dual(x, x))
    assert seen == [None, None]


def _given(name: str, value: Tensor, **inputs: Tensor) -> None:
    x = inputs["x"]
    operands.check_output("entry", name, value, x.shape, (x.dtype,), inputs=inputs, outputs={})


def test_an_output_made_in_inference_mode_is_refused_outside_of_it() -> None:
    """torch refuses to mark it as written, after it was."""
    x = torch.ones(4, 8)
    with torch.inference_mode():
        out = torch.empty(4, 8)
        _given("out", out, x=x)
    with pytest.raises(ValueError, match=r"^entry: out is an inference tensor; needs "):
        _given("out", out, x=x)


@pytest.mark.parametrize("lead", [(), (1,), (3,)], ids=["2d", "single", "batch"])
def test_columns_that_no_input_has_are_free(lead: tuple[int, ...]) -> None:
    """A slice beside the input's in one buffer, whatever dimensions walk the rows; one column in common is refused."""
    wide = torch.ones(*lead, 5, 24)
    x = wide[..., 8:16]
    for free in (wide[..., :8], wide[..., 16:]):
        _given("out", free, x=x)
    for shared in (wide[..., 7:15], wide[..., 9:17], x, wide[..., 4:20:2]):
        with pytest.raises(ValueError, match="out is overlapping x"):
            _given("out", shared, x=x)
    with pytest.raises(ValueError, match="dx is overlapping dy"):
        _given("dx", wide[..., 1:9], x=torch.ones(*lead, 5, 8), dy=x)


def test_an_output_elsewhere_names_the_first_operand() -> None:
    x = torch.ones(4, 8)
    with pytest.raises(ValueError, match=r"^entry: out is on meta; needs the device of q, cpu$"):
        operands.check_output("entry", "out", x.to("meta"), x.shape, (x.dtype,), inputs={"q": x, "k": x}, outputs={})


def test_single_rows_of_one_buffer_are_told_apart() -> None:
    wide = torch.ones(4, 24)
    _given("out", wide[:1, :8], x=wide[:1, 8:16])
    with pytest.raises(ValueError, match="out is overlapping weight"):
        _given("out", wide[1:2, 8:16], x=torch.ones(1, 8), weight=wide[:, :12])
    _given("out", wide[1:2, 8:16], x=torch.ones(1, 8), weight=wide[:, :8], z=wide[:, 16:])
    _given("out", wide[:, 8:16], x=torch.ones(4, 8), weight=wide[2, 16:].expand(4, 8))


def test_heads_of_one_buffer_are_told_apart_by_tokens_or_by_heads() -> None:
    tokens = torch.ones(5, 6, 16)
    x = tokens[:, 2:4]
    _given("out", tokens[:, 4:], x=x)
    _given("out", tokens[:, :2], x=x)
    _given("out", tokens[..., 8:], x=tokens[..., :8])
    for shared in (tokens[:, 1:3], tokens[:, 3:5]):
        with pytest.raises(ValueError, match="out is overlapping x"):
            _given("out", shared, x=x)


def test_dense_operands_are_read_as_they_are() -> None:
    x = torch.ones(6, 16, dtype=torch.bfloat16)
    read = [x, x.view(2, 3, 16), x[1:2, 8:], x.view(-1)[8:24]]
    assert all(layout.is_dense(value) and layout.rows(value) is value for value in read)
    # Strided, at an address off the grid, without elements.
    assert not any(map(layout.is_dense, (x[:, :8], x.t(), x.view(-1)[1:9], x[:0])))


def test_bf16_ulp_is_the_distance_to_the_next_number() -> None:
    exact = torch.tensor([1.0, 1.5, 2.0, 255.0, -3.0, 1e-20, 1e30], dtype=torch.float64)
    numbers = exact.to(torch.bfloat16)
    upward = (numbers.abs().view(torch.int16) + 1).view(torch.bfloat16)
    assert bf16_ulp(numbers.double()).tolist() == (upward.double() - numbers.abs().double()).tolist()
    assert bf16_ulp(torch.tensor([0.0], dtype=torch.float64)).item() == 2.0**-133


def test_a_weight_gradient_in_bf16_has_a_budget_of_its_own() -> None:
    assert budget_name("dweight", torch.bfloat16) == "dweight_bf16"
    assert budget_name("dweight", torch.float32) == "dweight"
    assert budget_name("dx", torch.bfloat16) == "dx"


# --- cpu_math ---------------------------------------------------------------------------------------------------


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sizes", [(64, 128, 128), (64, 64, 128), (128, 64, 128), (1, 128, 64), (64, 128, 1), (33, 1, 64), (1, 64, 1)]
)
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_a_product_has_its_bits_in_every_batch_and_with_any_number_of_threads(
    transposed: str, sizes: tuple[int, int, int], dtype: torch.dtype, restored_threads: None
) -> None:
    """torch.bmm alone fails this in FP64: two matrices on three threads are cut. So does a batch that is filled up by
    copying transposed matrices into rows, and one vector on one thread."""
    m, k, n = sizes
    a, b = normal(0, 8, m, k, dtype=dtype), normal(1, 8, k, n, dtype=dtype)
    a = a.mT.contiguous().mT if "a" in transposed else a
    b = b.mT.contiguous().mT if "b" in transposed else b
    torch.set_num_threads(1)
    want = cpu_math.products(a, b)
    torch.testing.assert_close(want.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for some in (1, 2, 5, 8):
            got = torch.cat([cpu_math.products(a[i : i + some], b[i : i + some]) for i in range(0, 8, some)])
            assert torch.equal(got, want), f"{some} matrices on {threads} threads"
    assert torch.equal(cpu_math.products(a.unflatten(0, (2, 4)), b.unflatten(0, (2, 4))), want.view(2, 4, m, n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["transposed left", "transposed right", "both transposed", "blocks", "expanded"])
def test_a_product_has_its_bits_however_its_matrices_lie(
    layout: str, dtype: torch.dtype, restored_threads: None
) -> None:
    """In FP64 a transposed matrix is multiplied in another order of its sums; zeros that fill a batch up must not
    decide which."""
    a, b = normal(0, 5, 64, 64, dtype=dtype), normal(1, 5, 64, 64, dtype=dtype)
    if layout == "expanded":
        b = b[:1].expand(5, -1, -1)
    torch.set_num_threads(1)
    want = cpu_math.products(a, b.contiguous())
    if layout in ("transposed left", "both transposed"):
        a = a.mT.contiguous().mT
    if layout in ("transposed right", "both transposed"):
        b = b.mT.contiguous().mT
    if layout == "blocks":
        wide = normal(2, 5, 128, 192, dtype=dtype)
        wide[:, 64:, 128:] = b
        b = wide[:, 64:, 128:]
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for some in (1, 2, 5):
            got = torch.cat([cpu_math.products(a[i : i + some], b[i : i + some]) for i in range(0, 5, some)])
            assert torch.equal(got, want), f"{some} matrices on {threads} threads"


def test_a_trace_would_keep_what_is_read_on_the_host() -> None:
    """``torch.jit.trace``: offsets of later calls would be those of the traced one."""

    def first(values: Tensor) -> Tensor:
        return values + operands.host_ints(values, entry="f")[0]

    with pytest.raises(RuntimeError, match=r"^f: values is read on the host by torch\.jit\.trace"):
        torch.jit.trace(first, (torch.tensor([3, 4], dtype=torch.int32),))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_product_has_its_bits_whatever_precision_torch_multiplies_with(precision: str, tmp_path: Path) -> None:
    """On processors that multiply BF16, oneDNN did for "medium", and in other parts with other numbers of threads."""
    a, b = normal(0, 4, 64, 256, dtype=torch.float32), normal(1, 4, 256, 128, dtype=torch.float32)
    want = cpu_math.products(a, b)
    script = f"""
import sys, torch
from cake_core import cpu_math
torch.set_float32_matmul_precision({precision!r})
a, b, want = torch.load(sys.argv[1])
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    assert torch.equal(cpu_math.products(a, b), want), threads
    assert torch._C._get_mkldnn_enabled()
one, other = cpu_math._whole_products(), cpu_math._whole_products()  # of two Python threads
one.__enter__()
other.__enter__()
one.__exit__(None, None, None)
assert torch.equal(torch.bmm(a, b), want)
other.__exit__(None, None, None)
assert torch._C._get_mkldnn_enabled()
"""
    path = tmp_path / "operands.pt"
    torch.save((a, b, want), path)
    # In a process of its own: torch does not take the setting back whole.
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=120)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_column_has_its_bits_whatever_its_strides_say(dtype: torch.dtype, restored_threads: None) -> None:
    """It is contiguous with any stride of its only column, and the stride chose a routine."""
    torch.set_num_threads(1)
    a, b = normal(0, 5, 70, 257, dtype=dtype), normal(1, 5, 257, 1, dtype=dtype)
    want = cpu_math.products(a, b)
    for other in (b.mT.contiguous().mT, b.as_strided(b.shape, (257, 1, 257)), b.as_strided(b.shape, (257, 1, 7))):
        assert torch.equal(cpu_math.products(a, other), want)
    row, want = a[:, :1], cpu_math.products(a[:, :1], a.mT)
    for other in (row.mT.contiguous().mT, row.contiguous().as_strided(row.shape, (257, 3, 1))):
        assert torch.equal(cpu_math.products(other, a.mT), want)


def test_products_of_nothing() -> None:
    assert cpu_math.products(torch.ones(0, 3, 4, 5), torch.ones(0, 3, 5, 6)).shape == (0, 3, 4, 6)


@pytest.mark.parametrize("function", [cpu_math.exp, cpu_math.log, cpu_math.sigmoid])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_element_has_its_bits_wherever_it_stands(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, restored_threads: None
) -> None:
    """torch.exp takes another routine for the elements behind the last whole vector."""
    z = normal(2, 40_001, dtype=dtype)
    z = z.abs() if function is cpu_math.log else z
    torch.set_num_threads(1)
    want = function(z)
    torch.testing.assert_close(want, getattr(torch, function.__name__)(z))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for begin in (0, 1, 39_990):
            assert torch.equal(function(z[begin:].contiguous()), want[begin:])
