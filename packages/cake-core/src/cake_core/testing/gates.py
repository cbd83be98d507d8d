"""What a test of numbers, bits and memory may pass: accuracy, same bits, no stray write, the same in a new process.

Every gate raises AssertionError itself, so it also holds under ``python -O`` and in ``cake verify``; no pytest needed.
"""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import message

__all__ = [
    "assert_guards",
    "assert_operands_untouched",
    "assert_rel_rms",
    "assert_same_bits",
    "fresh_process",
    "poisoned_empty",
    "rel_rms_limit",
]

_GUARD_BYTES = 256  # a multiple of every vector access, and it keeps the tensor's alignment
_GUARD = 0xA5
_POISON = 0xFF  # NaN in every IEEE-like float format, -1 in the signed integers
_OVER_ROUNDING = 1.02
_INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_rel_rms(got: Tensor, want: Tensor, budget: float, name: str, *, detect_scale: float | None = 1.02) -> float:
    """Relative RMS error of ``got`` against the FP64 ``want``, at most ``budget``; returns it.

    The error of a few elements scatters around its mean, and so does that of one correct rounding: an error over the
    budget is accepted up to ``rel_rms_limit``. What was accepted must refuse a scale error of ``detect_scale`` of this
    very output, in both directions; None is for tensors that are listed as exempt. A reference that is exactly zero
    wants exact zeros.
    """
    _assert_same_shape(got, want, name)
    dtype = got.dtype
    got, want = got.detach().double(), want.detach().double().to(got.device)
    if want.numel() == 0:
        return 0.0
    if not bool(want.any()):
        if bool(got.any()):  # NaN counts
            raise AssertionError(f"{name}: the reference is exactly zero, the result is not")
        return 0.0
    error, limit = _rel_rms(got, want), budget
    if not error <= budget:
        limit = rel_rms_limit(want, dtype, budget)
        if not error <= limit:  # NaN is refused
            rounding = f" and {limit:.3e}, {_OVER_ROUNDING} of one rounding to {dtype}" if limit > budget else ""
            raise AssertionError(f"{name}: relative RMS error {error:.3e} is over the budget {budget:.3e}{rounding}")
    for scale in (detect_scale, 1 / detect_scale) if detect_scale else ():
        if not _rel_rms(got * scale, want) > limit:
            raise AssertionError(f"{name}: the budget {limit:.3e} would accept a scale of {scale:.4f}")
    return error


def rel_rms_limit(want: Tensor, dtype: torch.dtype, budget: float) -> float:
    """What ``assert_rel_rms`` accepts of a result in ``dtype``: ``budget``, or 1.02 times the error of ``want`` rounded
    once to ``dtype`` where that is more. A budget below the mean error of a rounding to ``dtype``, about eps / 5, is
    meant for a finer dtype and stays as it is.
    """
    if not dtype.is_floating_point or budget < torch.finfo(dtype).eps / 5:
        return budget
    rounding = _OVER_ROUNDING * _rel_rms(want.to(dtype).double(), want.double())
    return max(budget, rounding) if math.isfinite(rounding) else budget


def _rel_rms(got: Tensor, want: Tensor) -> float:
    """Relative RMS error in FP64; NaN for an empty or zero reference."""
    return float((got - want).square().mean().sqrt()) / (float(want.square().mean().sqrt()) or math.nan)


def assert_same_bits(got: Tensor, want: Tensor, name: str) -> None:
    """Same shape, dtype and bits: NaN payloads and the sign of zero count. Names the first coordinate that differs."""
    _assert_same_shape(got, want, name)
    if got.dtype != want.dtype:
        raise AssertionError(f"{name}: dtype {got.dtype} instead of {want.dtype}")
    got_bits, want_bits = _bits(got), _bits(want).to(got.device)
    if torch.equal(got_bits, want_bits):
        return
    different = (got_bits != want_bits).flatten()
    first = int(different.nonzero()[0])
    coordinate = tuple(int(c) for c in torch.unravel_index(torch.tensor(first), got_bits.shape))
    width = 2 * got_bits.element_size()
    hexadecimal = [
        f"0x{int(bits[coordinate]) & (1 << 4 * width) - 1:0{width}x}" for bits in (got_bits.cpu(), want_bits.cpu())
    ]
    where = coordinate[: got.dim()]  # a complex element is compared as two parts
    raise AssertionError(
        f"{name}: {int(different.sum())} of {different.numel()} elements differ, first at {list(where)}: "
        f"{got[where].item()} ({hexadecimal[0]}) instead of {want[where].item()} ({hexadecimal[1]})"
    )


def _assert_same_shape(got: Tensor, want: Tensor, name: str) -> None:
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {list(got.shape)} instead of {list(want.shape)}")


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(_INTEGER_VIEW[tensor.element_size()])


def poisoned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | int) -> Tensor:
    """A dense tensor full of 0xFF bytes, which are NaN in a floating dtype, with guard bytes before and behind it.

    What a kernel forgot to write stays NaN; what it wrote outside shows in ``assert_guards``.
    """
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    raw = torch.full((_GUARD_BYTES + nbytes + _GUARD_BYTES,), _GUARD, dtype=torch.uint8, device=device)
    body = raw[_GUARD_BYTES : _GUARD_BYTES + nbytes].fill_(_POISON)
    return body.view(dtype).view(tuple(shape))


def assert_guards(tensor: Tensor, name: str) -> None:
    """The guard bytes around a tensor of ``poisoned_empty``, or around a view of one, are unchanged."""
    size = tensor.untyped_storage().nbytes()
    if size < 2 * _GUARD_BYTES:
        raise ValueError(message("assert_guards", name, "a tensor without guard bytes", "one made by poisoned_empty"))
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), 0, (size,), (1,))
    for side, guard in (("before", raw[:_GUARD_BYTES].flip(0)), ("behind", raw[-_GUARD_BYTES:])):
        touched = (guard != _GUARD).nonzero()
        if touched.numel():
            nearest, count = int(touched[0]) + 1, len(touched)
            raise AssertionError(f"{name}: {count} bytes {side} the tensor were written, the nearest {nearest} outside")


@contextmanager
def assert_operands_untouched(operands: Mapping[str, Tensor | None], *, retains_grad: bool = False) -> Generator[None]:
    """Operands keep their bits, their version counters and their ``grad`` attribute over the block.

    Args:
        operands: name -> tensor; None is skipped.
        retains_grad: the block runs a backward that accumulates into ``grad``, which is then not compared.
    """
    before = {
        name: (tensor, tensor.detach().clone(), tensor._version, tensor.grad)
        for name, tensor in operands.items()
        if tensor is not None
    }
    yield
    for name, (tensor, copy, version, grad) in before.items():
        assert_same_bits(tensor, copy, f"operand {name}")
        if tensor._version != version:
            raise AssertionError(f"operand {name}: written in place {tensor._version - version} times, with equal bits")
        if not retains_grad and tensor.grad is not grad:
            raise AssertionError(f"operand {name}: its grad was replaced")


_CHILD = """
import importlib, pickle, sys
with open(sys.argv[1], "rb") as file:
    path, target, arguments = pickle.load(file)
sys.path[:] = path
try:
    module, _, name = target.partition(":")
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    answer = (True, function(*pickle.loads(arguments)))
except BaseException as error:
    import traceback
    error.add_note("in the fresh process:\\n" + traceback.format_exc())
    answer = (False, error)
try:
    data = pickle.dumps(answer)
except BaseException as error:
    data = pickle.dumps((False, RuntimeError(f"{target}: the result does not pickle: {error!r}; {answer[1]!r}")))
with open(sys.argv[2], "wb") as file:
    file.write(data)
"""


def fresh_process(target: str, *args: Any) -> Any:
    """Call ``"module:function"`` with ``args`` in a new interpreter and return its result.

    The child has this process's ``sys.path`` and environment, and nothing of its state. Arguments and result pickle.
    Raises: the function's own exception, with the child's traceback as a note; RuntimeError when the child dies.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(message("fresh_process", "target", repr(target), "the form 'module:function'"))
    with tempfile.TemporaryDirectory(prefix="cake-fresh-") as folder:
        request, response = Path(folder, "request"), Path(folder, "response")
        request.write_bytes(pickle.dumps((sys.path, target, pickle.dumps(args))))
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(request), str(response)], capture_output=True, text=True, check=False
        )
        if not response.exists():
            raise RuntimeError(
                f"fresh_process: {target} ended with exit status {done.returncode} and no result: {done.stderr[-4000:]}"
            )
        succeeded, value = pickle.loads(response.read_bytes())
    if not succeeded:
        raise value
    return value
