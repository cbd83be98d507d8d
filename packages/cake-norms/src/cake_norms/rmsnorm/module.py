"""The layer ``ZeroCenteredRMSNorm``: one parameter, its allocation and its sequence-parallel mark."""

from __future__ import annotations

from typing import Any

import torch
from cake_core import device as device_layer
from cake_core.errors import message
from cake_core.operands import check_eps
from cake_core.served import one_of
from torch import Tensor

from .op import check_hidden_size

__all__ = ["ZeroCenteredRMSNorm"]

_DTYPES = (torch.bfloat16, torch.float32)
_ENTRY = "ZeroCenteredRMSNorm"


class ZeroCenteredRMSNorm(torch.nn.Module):
    """``zero_centered_rmsnorm`` with its weight.

    Args:
        hidden_size: 8, 16, ..., 16384, on every device.
        eps: added to the mean square.
        device: of the weight. None: where torch's factory functions allocate when a default device is set
            (``with torch.device("meta")``, ``torch.set_default_device``), otherwise the current CUDA device, or the
            CPU without CUDA.
        dtype: torch.bfloat16 or torch.float32; None: torch's default dtype.
        sequence_parallel: not None: ``weight.sequence_parallel`` is set to it here and by ``reset_parameters``, which
            tells Megatron whether to all-reduce the weight's gradient over the tensor-parallel group. None: the
            attribute is never created nor touched.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a hidden size or dtype that is not served, eps negative or not finite.
        NotImplementedError: the weight would land on a CUDA device older than sm_80.

    Constructing compiles nothing, and the module pins no variant: each call runs what is configured then.
    """

    weight: torch.nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sequence_parallel: bool | None = None,
    ) -> None:
        check_hidden_size(hidden_size, entry=_ENTRY)
        self_eps = check_eps(eps, entry=_ENTRY)
        if not isinstance(sequence_parallel, bool | None):
            raise TypeError(message(_ENTRY, "sequence_parallel", repr(sequence_parallel), "True, False or None"))
        if not isinstance(dtype, torch.dtype | None):
            raise TypeError(message(_ENTRY, "dtype", repr(dtype), "a torch.dtype or None"))
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in _DTYPES:
            raise ValueError(message(_ENTRY, "dtype", str(dtype), one_of(_DTYPES)))
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = self_eps
        self._sequence_parallel = sequence_parallel
        weight = torch.empty(hidden_size, device=_allocation_device() if device is None else device, dtype=dtype)
        kind, index = device_layer.device_of(weight)
        if kind == "cuda":
            from .backends import cuda

            cuda.check_device(index)
        self.weight = torch.nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros in place, which is the identity scale; sets the sequence-parallel mark that the constructor got."""
        with torch.no_grad():
            self.weight.zero_()
        self._mark()

    def forward(self, x: Tensor) -> Tensor:
        """y of x [..., hidden_size]; see ``zero_centered_rmsnorm``."""
        from .api import zero_centered_rmsnorm

        return zero_centered_rmsnorm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()  # copies of a Parameter lose its attributes

    def _mark(self) -> None:
        if self._sequence_parallel is not None:
            self.weight.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]


def _allocation_device() -> torch.device | None:
    """Where the weight goes when the caller names no device; None leaves it to torch's factory functions."""
    if default_device_is_set():
        return None
    if device_layer.device_count() > 0:
        return torch.device("cuda", device_layer.current_device())
    return torch.device("cpu")


def default_device_is_set() -> bool:
    """Whether ``torch.device`` as a context or ``torch.set_default_device`` decides where this thread allocates.

    ``torch.get_default_device`` answers "cpu" both when the CPU was chosen and when nothing was, and
    ``torch.utils._device.CURRENT_DEVICE`` misses the context form: the mode that acts on factories is asked instead.
    """
    try:
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._device import DeviceContext
    except ImportError:
        return torch.empty(0).device.type != "cpu"
    return any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
