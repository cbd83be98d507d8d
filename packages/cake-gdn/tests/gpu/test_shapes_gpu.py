"""Every shape of the benchmark, all heads: key heads repeat the operands of two, whose reference is FP64. Needs a GPU.

The reference is the chunk form without roundings (``testing/emulation.py``, which the CPU tests compare with the
recurrence) and serves all pairs of heads of one ratio. A head that has the operands of another has to have its bits,
and its neighbours have others, so a head that is read or written in another's place is seen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core import configure
from cake_core.testing.gates import assert_same_bits
from cake_gdn.testing.emulation import emulate
from cake_gdn.testing.shapes import BENCH
from cake_gdn.testing.steps import Step, assert_accurate, make_step
from cake_gdn.testing.tiles import EXACT
from torch import Tensor

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.slow,
    pytest.mark.large,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0"),
]

OUTPUTS = ("o", "dq", "dk", "dv", "dg", "dbeta")
_KEY_HEADS = 2  # of the reference


def _groups() -> dict[str, list[str]]:
    """Shapes that differ by their number of key heads alone, by layout and ratio."""
    found: dict[str, list[str]] = {}
    for shape, params in BENCH.items():
        key_heads, heads = params["heads"]
        layout = shape.removeprefix(f"{key_heads}-{heads}-")
        found.setdefault(f"{layout}, {heads // key_heads} value heads", []).append(shape)
    return found


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    configure(cake_gdn_variant="det")
    yield
    configure()
    gc.collect()
    torch.cuda.empty_cache()


def _of_heads(params: Mapping[str, Any], key_heads: int, step: Step) -> Step:
    """A step of so many key heads, which have the operands of ``step``'s in turn."""
    repeated = torch.arange(key_heads, device=DEVICE) % _KEY_HEADS
    group = step.v.shape[2] // _KEY_HEADS
    values = (repeated[:, None] * group + torch.arange(group, device=DEVICE)).flatten()
    q, k = (x[:, :, repeated] for x in (step.q, step.k))
    v, g, beta, do = (x[:, :, values] for x in (step.v, step.g, step.beta, step.do) if x is not None)
    if params.get("packed"):
        q, k, v = torch.cat([q, k, v], 2).split([key_heads, key_heads, len(values)], 2)
    return replace(step, q=q, k=k, v=v, g=g, beta=beta, do=do)


@pytest.mark.parametrize("group", _groups())
def test_every_head_of_every_shape_of_the_benchmark_is_right(group: str) -> None:
    shapes = _groups()[group]
    first = BENCH[shapes[0]]
    options = {name: value for name, value in first.items() if name not in ("lengths", "heads", "packed")}
    value_heads = _KEY_HEADS * first["heads"][1] // first["heads"][0]
    step = make_step(first["lengths"], (_KEY_HEADS, value_heads), device=DEVICE, **options)
    with torch.no_grad():
        ref = emulate(
            step.q, step.k, step.v, step.g, step.beta, step.do,
            rounding=EXACT,
            cu_seqlens=None if step.cu is None else step.cu.cpu(),
            use_qk_l2norm=step.norm,
        )  # fmt: skip
    want: dict[str, Tensor] = {name: ref[name] for name in OUTPUTS}
    for shape in shapes:
        key_heads = BENCH[shape]["heads"][0]
        got = _of_heads(BENCH[shape], key_heads, step).run()
        for name, value in got.items():
            each = value.shape[2] // key_heads * _KEY_HEADS
            alike = value.unflatten(2, (-1, each))
            got[name] = alike[:, :, 0]
            assert_same_bits(
                alike, alike[:, :, :1].expand_as(alike), f"{shape}: {name} of heads with the same operands"
            )
        assert_accurate(got, want, shape, gates=first["gates"])
