"""``conv1d`` never waits for the device, runs on the current stream, is captured, and reads no old memory. Needs a
GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cake_conv1d import backends, causal_conv1d, plan
from cake_conv1d.backends import cuda
from cake_conv1d.testing.steps import Step, assert_same_step, make_step, offsets
from cake_core import configure, workspace
from cake_core.testing.gates import assert_guards, assert_same_bits, poisoned_empty
from torch import Tensor

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of capability 8.0 or later"),
]
LONG = 2_000_000_000  # clocks, about a second


def _configure(policy: str = "bf16", variant: str = "det", pool: int = 0) -> None:
    configure(cake_conv1d_variant=variant, cake_conv1d_silu_grad_preactivation=policy, cake_workspace_pool_bytes=pool)


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    _configure()
    yield
    configure()
    workspace.release_pool()


STEPS: dict[str, Callable[[], Step]] = {
    "no offsets": lambda: make_step((1057,), 1280, device=DEVICE),
    "documents": lambda: make_step((5, 0, 1000, 52), 1280, device=DEVICE),
    "documents, int64": lambda: replace(
        make_step((5, 0, 1000, 52), 1280, device=DEVICE), cu=offsets((5, 0, 1000, 52), DEVICE, torch.int64)
    ),
    "states": lambda: make_step((5, 0, 1000, 52), 1280, device=DEVICE, state="bfloat16"),
    "a batch": lambda: replace(
        step := make_step((1000,), 1280, device=DEVICE), x=step.x.view(4, 250, 1280), dy=step.dy.view(4, 250, 1280)
    ),
}


# ---- the host


@pytest.mark.parametrize("variant", ["det", "fast"])
@pytest.mark.parametrize("name", STEPS)
def test_no_call_waits_for_the_device(name: str, variant: str) -> None:
    """Offsets are never read, nor copied from host memory."""
    _configure(variant=variant)
    step = STEPS[name]()
    calls = step.run, step.differentiate
    for call in calls:
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_sync_check_sees_a_read() -> None:
    """What the test above relies on."""
    values = torch.ones(4, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            values.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- graphs


@pytest.mark.parametrize("autograd", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_captured_step_replays_on_new_contents(name: str, autograd: bool) -> None:
    """New rows and new documents in place; with the pool on, whose buffers a graph must not hold."""
    _configure(pool=1 << 28)
    step = STEPS[name]()
    call = step.differentiate if autograd else step.run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed, lengths in ((10, (400, 1, 0, 656)), (20, (0, 0, 1057, 0)), (30, (1, 1, 1, 1054))):
        other = make_step((step.x.numel() // 1280,), 1280, device=DEVICE, seed=seed)
        step.x.copy_(other.x.view(step.x.shape))
        step.dy.copy_(other.dy.view(step.dy.shape))
        step.weight.copy_(other.weight)
        if step.cu is not None:
            step.cu.copy_(offsets(lengths, DEVICE))
        want = call()
        for output in captured.values():
            output.fill_(torch.nan)
        workspace.release_pool()
        graph.replay()
        assert_same_step(captured, want, f"replay {seed}")


# ---- streams


@pytest.mark.parametrize("name", STEPS)
def test_a_side_stream_has_the_same_bits(name: str) -> None:
    step = STEPS[name]()
    want = step.run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = step.run() | {f"{name} of autograd": value for name, value in step.differentiate().items()}
    torch.cuda.current_stream().wait_stream(side)
    assert_same_step(got, want, "side stream", list(want))
    for name_of, value in want.items():
        assert_same_bits(got[f"{name_of} of autograd"], value, f"side stream, autograd: {name_of}")


def test_a_long_kernel_on_the_default_stream_delays_no_side_stream() -> None:
    step = STEPS["states"]()
    want = step.run()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step.run()  # memory of this stream is there
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    with torch.cuda.stream(side):
        got = step.run()
    side.synchronize()
    assert not torch.cuda.default_stream().query(), "the default stream was waited for"
    torch.cuda.synchronize()
    assert_same_step(got, want, "beside a long kernel")


def test_calls_on_two_streams_at_one_time_share_no_buffer() -> None:
    _configure(pool=1 << 28)
    steps = [make_step((4099,), 1280, device=DEVICE, seed=seed) for seed in range(2)]
    wants = [step.run() for step in steps]
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    results: list[list[dict[str, Tensor]]] = [[], []]
    for _ in range(20):
        for step, stream, found in zip(steps, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(step.run())
    torch.cuda.synchronize()
    for want, found in zip(wants, results, strict=True):
        for got in found:
            assert_same_step(got, want, "two streams")


# ---- configuration


def test_the_policy_is_read_at_each_call_and_the_backward_has_its_forwards() -> None:
    step = STEPS["documents"]()
    wants: dict[str, dict[str, Tensor]] = {}
    for policy in ("bf16", "fp32"):
        _configure(policy)
        wants[policy] = step.run()
    assert not torch.equal(wants["bf16"]["dweight"], wants["fp32"]["dweight"])
    for forward, backward in (("bf16", "fp32"), ("fp32", "bf16")):
        _configure(forward)
        leaves = step.x.detach().requires_grad_(), step.weight.detach().requires_grad_()
        y = causal_conv1d(*leaves, step.cu)
        assert isinstance(y, Tensor)
        _configure(backward, variant="fast")
        dx, dweight = torch.autograd.grad(y, leaves, step.dy)
        assert_same_step({"y": y.detach(), "dx": dx, "dweight": dweight}, wants[forward], f"forward under {forward}")


@pytest.mark.parametrize("name", STEPS)
def test_deterministic_algorithms_change_nothing(name: str) -> None:
    """No alert, no fill that hides what was not written, and det where fast is configured."""
    step = STEPS[name]()
    want = step.run()
    _configure(variant="fast")
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_step(step.run(), want, "explicit")
        assert_same_step(step.differentiate(), want, "autograd")
    finally:
        torch.use_deterministic_algorithms(False)


# ---- memory


def test_a_poisoned_pool_changes_no_bit() -> None:
    step = make_step((4097,), 2048, device=DEVICE)
    want = step.run()
    _configure(pool=1 << 28)
    nbytes = plan.plan_backward(4097, 2048).partial_bytes(2048, 4)
    assert nbytes > 0
    workspace.take("conv1d", "partial", nbytes).fill_(0xFF)
    hits = workspace.stats()["hits"]
    assert_same_step(step.run(), want, "pool full of NaN")
    assert workspace.stats()["hits"] == hits + 1


@pytest.mark.parametrize("name", STEPS)
def test_every_element_of_an_output_is_written_and_nothing_beside_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All memory that the op allocates is NaN with guards around it."""
    step = STEPS[name]()
    want = step.run()
    made: list[Tensor] = []

    def uninitialized(shape: tuple[int, ...], dtype: torch.dtype, device: object) -> Tensor:
        made.append(poisoned_empty(tuple(shape), dtype, DEVICE))
        return made[-1]

    def uninitialized_like(tensor: Tensor, device: object) -> Tensor:
        return uninitialized(tuple(tensor.shape), tensor.dtype, device)

    def take(op: str, role: str, nbytes: int, device: object = None) -> Tensor:
        made.append(poisoned_empty((nbytes // 4,), torch.float32, DEVICE))
        return made[-1].view(torch.uint8)

    poisoned = SimpleNamespace(uninitialized=uninitialized, uninitialized_like=uninitialized_like, take=take)
    for module in (cuda, backends):
        monkeypatch.setattr(module, "workspace", poisoned)
    assert_same_step(step.run(), want, "poisoned memory")
    assert len(made) >= 3
    for index, tensor in enumerate(made):
        assert_guards(tensor, f"allocation {index}")
