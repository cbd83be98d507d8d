"""What a training step of a layer costs the host on a machine with a GPU, beside torch's own part of it."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LAYERS", "LayerCost", "layer_cost"]

LAYERS = 16
"""One backward call of torch wakes its thread for the device once, however many layers there are. That takes 50 us and
more where threads wake slowly, and is no cost of a layer: what is measured is a chain of so many."""
_EMPTY, _ALLOCATION = 0.025, 1.8  # microseconds, of the host that bounds are stated for


class LayerCost(NamedTuple):
    """Microseconds."""

    layer: float
    """Of a layer: two forwards and a backward."""
    torch: float
    """Of them torch's autograd, with tensors of the same sizes to return."""
    empty: float
    """Of an empty Python call."""
    allocation: float
    device: float
    """Of the layer on the device, without the host's gaps; 0 on the CPU."""

    @property
    def own(self) -> float:
        return self.layer - self.torch

    @property
    def slower(self) -> float:
        """Than a host where an empty call takes 25 ns and an allocation 1.8 us. Virtual machines with such a device
        were seen that take 1.3 times as long for the one and 2.3 times for the other."""
        return max(1.0, self.empty / _EMPTY, self.allocation / _ALLOCATION)

    def check(self, bound: float, record: Callable[[str, object], None]) -> None:
        """``record`` every figure. Raises: AssertionError where the layer takes more than ``bound`` beside torch's
        part, on a slower host so many times as much."""
        for name, value in self._asdict().items():
            record(name, f"{value:.4g} us")
        found = f"{self.layer:.1f} us a layer, {self.torch:.1f} of them torch's autograd"
        if self.own > bound * self.slower:
            raise AssertionError(f"{found}, {bound:g} times {self.slower:.2f} allowed beside it")


class _Nothing(torch.autograd.Function):
    """torch's own part of a layer: it keeps and returns tensors of the same sizes and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.set_materialize_grads(False)
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple([saved.new_empty(saved.shape) for saved in ctx.saved_tensors])


def _nothing(x: Tensor, *parameters: Tensor) -> Tensor:
    return _Nothing.apply(x, *parameters) if torch.is_grad_enabled() else x  # pyright: ignore[reportReturnType]


def _training(layer: Callable[..., Tensor], x: Tensor, dy: Tensor, parameters: Sequence[Sequence[Tensor]]) -> object:
    """What checkpointed layers run: a forward, the same again with autograd, and the backward."""
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            y = x
            for own in parameters:
                y = layer(y, *own)
    return torch.autograd.grad(y, (x, *(tensor for own in parameters for tensor in own)), dy)


def _repeated(call: Callable[[], object]) -> Callable[[], object]:
    return lambda: [call() for _ in range(1000)]


def _costs(calls: Sequence[Callable[[], object]], idle: Callable[[], object], rounds: int) -> list[float]:
    """Microseconds of each call, the best of many runs taken in turn, each onto an idle device: no launch waits for
    room in the queue."""
    timers = [timeit.Timer(call, idle) for call in calls]
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for index, timer in enumerate(timers):
            best[index] = min(best[index], *timer.repeat(repeat=5, number=1))
    return [seconds * 1e6 for seconds in best]


def _device_time(call: Callable[[], object], host: float) -> float:
    """Microseconds on the device, which waits at first until the host, that takes ``host`` of them, is ahead."""
    cuda: Any = torch.cuda
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(int(4 * host * 2e3))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def layer_cost(
    layer: Callable[..., Tensor], x: Tensor, parameters: Sequence[Tensor], dy: Tensor, *, rounds: int = 30
) -> LayerCost:
    """The cost of one of ``LAYERS`` layers in a chain, y = layer(x, *parameters) of x's shape.

    Args:
        parameters: of one layer; every layer has its own. They and x want gradients.
        dy: the gradient of the last y.
    """
    x = x.detach().requires_grad_()
    own = [[tensor.detach().clone().requires_grad_() for tensor in parameters] for _ in range(LAYERS)]
    ours, torchs, empty, allocation = _costs(
        (
            lambda: _training(layer, x, dy, own),
            lambda: _training(_nothing, x, dy, own),
            _repeated(lambda: None),
            _repeated(lambda: x.new_empty(16, 2048)),
        ),
        torch.cuda.synchronize if x.is_cuda else lambda: None,
        rounds,
    )
    device = _device_time(lambda: _training(layer, x, dy, own), ours) if x.is_cuda else 0.0
    return LayerCost(ours / LAYERS, torchs / LAYERS, empty / 1e3, allocation / 1e3, device / LAYERS)
