"""Arithmetic of the CPU backends whose bits depend on the numbers alone.

torch.sum picks its order by memory layout, batch size and thread count, and elementwise transcendentals use another
routine for the elements behind the last whole vector of a thread's share. The helpers here do neither, so that a row
alone has the bits it has in a batch, with any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from .graphs import outside_of_graphs

__all__ = ["BLOCK_ROWS", "as_written", "blocks", "deliver", "exp", "log", "products", "row_sum", "sigmoid", "sum_rows"]

BLOCK_ROWS = 1024

# Elements that torch gives to one thread whatever the thread count is (its grain is 32768), in whole vectors.
_SERIAL = 16384
_VECTOR = 64

_lock, _inside, _switched_off = Lock(), 0, False

F = TypeVar("F", bound=Callable[..., Any])


def as_written(function: F) -> F:
    """``function`` in the operations and dtypes that it names: without autograd, without autocast, which multiplies in
    BF16, and outside of compiled graphs, which reorder."""

    @outside_of_graphs
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run  # pyright: ignore[reportReturnType]


def blocks(rows: int) -> Iterator[slice]:
    """Consecutive blocks of 1024 rows."""
    for start in range(0, rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, rows))


def row_sum(terms: Tensor) -> Tensor:
    """[rows, n] -> [rows, 1]; overwrites ``terms``. The order of a sum is a function of n."""
    return _fold(terms, 1)


def sum_rows(terms: Tensor) -> Tensor:
    """[rows, n] -> [n] in FP64; may overwrite ``terms``. The order of a sum is a function of the number of rows."""
    return _fold(terms.double(), 0)[0]


def sigmoid(z: Tensor) -> Tensor:
    """The logistic function of a contiguous tensor."""
    return _elementwise(torch.sigmoid, z)


def exp(z: Tensor) -> Tensor:
    """The exponential function of a contiguous tensor."""
    return _elementwise(torch.exp, z)


def log(z: Tensor) -> Tensor:
    """The natural logarithm of a contiguous tensor."""
    return _elementwise(torch.log, z)


def _elementwise(function: Callable[..., Tensor], z: Tensor) -> Tensor:
    """``function`` in whole vectors, as much of them at a time as one thread takes."""
    flat = z.reshape(-1)
    padding = -flat.numel() % _VECTOR
    if padding:
        flat = torch.cat((flat, flat.new_zeros(padding)))
    out = torch.empty_like(flat)
    for start in range(0, flat.numel(), _SERIAL):
        function(flat[start : start + _SERIAL], out=out[start : start + _SERIAL])
    return out[: z.numel()].view(z.shape)


def products(a: Tensor, b: Tensor) -> Tensor:
    """[..., m, k] @ [..., k, n], matrix by matrix; FP32 or FP64, leading sizes alike.

    A product has the bits that it has alone wherever every thread multiplies whole matrices: with fewer matrices than
    threads MKL cuts one in two (seen in FP64 from three threads on). So zeros fill the batch up to the threads. MKL
    also sums in another order where a matrix lies transposed (FP64): what is filled up lies row by row, so all do.
    A column lies the same either way and keeps the strides it came with, which choose a routine as well: they are made
    those of rows. A vector alone would get a routine of its own, so it gets company too.

    ``torch.set_float32_matmul_precision("medium")`` lets oneDNN multiply FP32 in BF16, by threads; here it does not.
    """
    lead, count = a.shape[:-2], a.shape[:-2].numel()
    left, right = (x.contiguous().view(-1).view(count, *x.shape[-2:]) for x in (a, b))
    padding = -count % torch.get_num_threads()
    if count + padding == 1 and 1 in (a.shape[-2], b.shape[-1]):
        padding = 1
    if padding:
        left, right = (torch.cat((x, x.new_zeros(padding, *x.shape[1:]))) for x in (left, right))
    with _whole_products():
        return torch.bmm(left, right)[:count].view(*lead, a.shape[-2], b.shape[-1])


@contextmanager
def _whole_products() -> Iterator[None]:
    """Within, oneDNN multiplies nothing where it may multiply FP32 in fewer bits. Its switch is the process's: the
    first thread that comes turns it off, the last one that leaves on again; who turns it at that time does so in vain.
    """
    if torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee"):  # pyright: ignore[reportAttributeAccessIssue]
        yield
        return
    global _switched_off, _inside
    bindings: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    with _lock:
        if _inside == 0 and (_switched_off := bindings._get_mkldnn_enabled()):
            bindings._set_mkldnn_enabled(False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _switched_off:
                bindings._set_mkldnn_enabled(True)


def _fold(terms: Tensor, dim: int) -> Tensor:
    """Add the upper half to the lower half until one slice is left, in place. Elementwise additions have one order."""
    size = terms.shape[dim]
    while size > 1:
        half = (size + 1) // 2
        terms.narrow(dim, 0, size - half).add_(terms.narrow(dim, half, size - half))
        size = half
    return terms.narrow(dim, 0, 1)


def deliver(value: Tensor, given: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """``value`` in ``dtype``, or written to the tensor that the caller gave."""
    if given is not None:
        return given.copy_(value)
    return value if dtype is None else value.to(dtype)
