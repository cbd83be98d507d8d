"""The device layer: architectures of devices, who answers, allocations without torch's deterministic fill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core import device
from cake_core.testing.fake_cuda import FakeCuda


class Package:
    """A kernel package with one library per architecture."""

    def __init__(self, *archs: str) -> None:
        self.archs = archs
        self.asked = 0

    def libraries(self, arch: str | None = None) -> tuple[str, ...]:
        self.asked += 1
        return tuple(f"demo_{a}" for a in self.archs if arch in (None, a))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_importing_the_device_layer_and_the_pool_imports_no_torch() -> None:
    code = "import sys, cake_core.device, cake_core.workspace, cake_core.bench; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((10, 7), "sm_107a")],
)
def test_a_capability_has_its_architecture(capability: tuple[int, int], arch: str) -> None:
    """R46: capability -> architecture table."""
    with FakeCuda(capability=capability):
        assert device.device_arch(0) == arch


class Resident:
    """What the layer asks of a tensor."""

    def __init__(self, kind: str, index: int = -1) -> None:
        self.is_cuda, self.is_cpu = kind == "cuda", kind == "cpu"
        self.device = SimpleNamespace(type=kind, index=None if index < 0 else index)
        self.get_device = lambda: index


@pytest.mark.parametrize(
    ("homes", "together"),
    [
        ([("cuda", 1)] * 3, ("cuda", 1)),
        ([("cpu", -1)] * 2, ("cpu", None)),
        ([("meta", -1)], ("meta", None)),
        ([("cuda", 0), ("cuda", 0), ("cuda", 1)], None),
        ([("cuda", 0), ("cpu", -1)], None),
        ([("cpu", -1), ("cuda", 0)], None),
        ([("cuda", 0), ("xpu", 0)], None),
        ([], None),
    ],
)
def test_tensors_live_together_or_not(homes: list[tuple[str, int]], together: object) -> None:
    """As ``device_of`` says of each: by the backend of a process without a fake."""
    tensors: Any = [Resident(*home) for home in homes]
    assert device.home_of(tensors) == together


def test_fake_devices_answer_for_several_tensors() -> None:
    with FakeCuda() as fake:
        here, there, host = fake.cuda(torch.zeros(2), 0), fake.cuda(torch.zeros(2), 1), torch.zeros(2)
        assert device.home_of((there, there.view(1, 2))) == ("cuda", 1)
        for apart in ((here, there), (here, host), (host, here)):
            assert device.home_of(apart) is None


@pytest.mark.parametrize("which", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_device_is_named_by_index_string_or_torch_device(which: object) -> None:
    """R46: every way to name a device asks that device, not the current one."""
    with FakeCuda(capability={0: (8, 0), 1: (9, 0)}):
        assert device.device_arch(which) == "sm_90a"


@pytest.mark.parametrize("which", [None, "cuda", torch.device("cuda")])
def test_without_an_index_the_current_device_answers(which: object) -> None:
    """R46: the current device is asked at every call, its answer is not remembered as that of no device."""
    with FakeCuda(capability={0: (8, 0), 1: (9, 0)}) as fake:
        assert device.device_arch(which) == "sm_80"
        fake.current = 1
        assert device.device_arch(which) == "sm_90a"


def test_the_architecture_is_memoised_per_device_and_package() -> None:
    """R46: memoised per device index; another package has its own answer."""
    portable, hopper = Package("sm_80"), Package("sm_80", "sm_90a")
    with FakeCuda(capability=(9, 0)):
        assert [device.device_arch(0, package=p) for p in (portable, hopper, None)] == ["sm_80", "sm_90a", "sm_90a"]
        asked = portable.asked, hopper.asked
        assert [device.device_arch(0, package=p) for p in (portable, hopper, None)] == ["sm_80", "sm_90a", "sm_90a"]
        assert (portable.asked, hopper.asked) == asked


def test_a_fake_drops_what_was_memoised() -> None:
    """R46: installing a fake, and leaving it, forgets the architectures of the other one's devices."""
    with FakeCuda(capability=(9, 0)) as outer:
        assert device.device_arch(0) == "sm_90a"
        with FakeCuda(capability=(10, 0)):
            assert device.device_arch(0) == "sm_100a"
        assert device.device_arch(0) == "sm_90a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer, "_capability", {0: (8, 0), 1: (8, 0)})
        with outer:
            assert device.device_arch(0) == "sm_80"


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (8, 9), (11, 0), (12, 0)])
def test_an_unknown_capability_is_named_with_the_supported_ones(capability: tuple[int, int]) -> None:
    """R46: NotImplementedError naming the capability and the supported list."""
    with FakeCuda(capability=capability), pytest.raises(NotImplementedError) as raised:
        device.device_arch(1)
    text = str(raised.value)
    assert f"{capability[0]}.{capability[1]}" in text
    assert "cuda:1" in text
    for arch in ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_107a"):
        assert arch in text


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1)])
def test_a_portable_package_runs_everywhere_from_8_0_on(capability: tuple[int, int]) -> None:
    """R46: without the exact architecture the sm_80 entry serves, whether the capability has a name or not."""
    with FakeCuda(capability=capability):
        assert device.device_arch(0, package=Package("sm_80", "sm_100a")) == "sm_80"


def test_a_portable_package_does_not_reach_below_8_0() -> None:
    """R46: sm_80 code does not run on a device of capability 7.5."""
    with FakeCuda(capability=(7, 5)), pytest.raises(NotImplementedError, match=r"7\.5.*sm_80"):
        device.device_arch(0, package=Package("sm_80"))


def test_a_package_without_the_architecture_names_what_it_serves() -> None:
    """R46: a Hopper-only package on sm_80 and on Blackwell is an error that lists sm_90a alone."""
    for capability in ((8, 0), (10, 0)):
        with FakeCuda(capability=capability), pytest.raises(NotImplementedError) as raised:
            device.device_arch(0, package=Package("sm_90a"))
        assert "sm_90a" in str(raised.value)
        assert "sm_100a" not in str(raised.value)


@pytest.mark.parametrize("which", ["cpu", torch.device("cpu"), "meta"])
def test_another_device_type_has_no_architecture(which: object) -> None:
    """R46: the CPU is no architecture."""
    with FakeCuda(), pytest.raises(NotImplementedError, match=str(which)):
        device.device_arch(which)


@pytest.mark.parametrize("which", [True, 1.0, (0,)])
def test_a_device_of_another_python_type_is_a_type_error(which: object) -> None:
    """R46: bool is not an index, also when index 1 is memoised."""
    with FakeCuda():
        device.device_arch(1)
        with pytest.raises(TypeError, match="device_arch: device"):
            device.device_arch(which)


@pytest.mark.parametrize("which", [2, -1, "cuda:7", "no such device"])
def test_a_device_that_does_not_exist_is_a_value_error(which: object) -> None:
    """R46: index out of range and unknown device string."""
    with FakeCuda(devices=2), pytest.raises(ValueError, match="device_arch: device"):
        device.device_arch(which)


@pytest.mark.parametrize("which", [None, 0, "cuda"])
def test_a_machine_without_devices_is_a_runtime_error(which: object) -> None:
    """R46: no device at all is the environment's fault."""
    with FakeCuda(devices=0), pytest.raises(RuntimeError, match="without a CUDA device"):
        device.device_arch(which)


def test_a_cpu_tensor_lives_on_the_cpu() -> None:
    assert device.device_of(torch.ones(2)) == ("cpu", None)
    assert device.device_of(torch.ones(2, device="meta")) == ("meta", None)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 0, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_the_unfilled_tensor_is_the_dense_one_torch_makes(
    shape: tuple[int, ...], dtype: torch.dtype, deterministic: None
) -> None:
    """R74: same shape, strides, dtype and size as ``torch.empty``."""
    got, want = device.uninitialized_like_torch(shape, dtype, torch.device("cpu")), torch.empty(shape, dtype=dtype)
    assert (got.shape, got.stride(), got.dtype, got.storage_offset()) == (want.shape, want.stride(), want.dtype, 0)
    assert got.untyped_storage().nbytes() == want.untyped_storage().nbytes()
    assert got.is_contiguous()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: float(x[0]),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.repeat_interleave(torch.ones(4, dtype=torch.int64)),
    ],
    ids=["item", "bool", "float", "tolist", "numpy", "cpu", "nonzero", "mask", "equal", "masked_select", "repeat"],
)
def test_the_guard_refuses_a_host_read(read: object) -> None:
    """Without a fake device every tensor counts, and nothing is refused outside the block."""
    x = torch.randn(4)
    with device.synchronize_forbidden(), pytest.raises(RuntimeError, match="the host reads a device tensor"):
        read(x)  # type: ignore[operator]
    read(x)  # type: ignore[operator]


def test_the_guard_lets_computation_pass() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with device.synchronize_forbidden():
        y = (x.to(torch.bfloat16)[1:, ::2] @ torch.ones(4, 3, dtype=torch.bfloat16)).float().square()
        y[torch.tensor([0, 2])].sum().backward()
        assert x.shape == (4, 8)
    assert x.grad is not None
