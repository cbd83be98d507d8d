"""FakeCuda: where tensors live, what is allocated, which program would be launched where."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from cake_core import device, workspace
from cake_core.loader import KernelPackage
from cake_core.testing.fake_cuda import FakeCuda, Launch, recorded_launches
from torch import Tensor


class DemoPackage(KernelPackage):
    def __init__(self) -> None:
        super().__init__(Path("kernels"), Path("aot"))

    def libraries(self, arch: str | None = None) -> tuple[str, ...]:
        return tuple(f"double_{a}" for a in ("sm_80", "sm_90a") if arch in (None, a))


PACKAGE = DemoPackage()


class Double(torch.autograd.Function):
    """What an op looks like to the layer: backend by residence, scratch, output, one program."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return run(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return run(grads[0].contiguous())


def run(x: Tensor) -> Tensor:
    kind, index = device.device_of(x)
    if kind == "cpu":
        return 2 * x
    assert index is not None
    y = workspace.uninitialized(x.shape, x.dtype, index)
    scratch = workspace.take("double", "scratch", 64, index)
    PACKAGE.function(f"double_{device.device_arch(index, package=PACKAGE)}")(y, x, scratch)
    return y


def emulate(launch: Launch) -> None:
    launch.args[0].copy_(2 * launch.args[1])


def test_tensors_live_where_they_were_put() -> None:
    with FakeCuda() as fake:
        host, x = torch.randn(4, 6), torch.randn(4, 6, device="cuda:1")
        assert device.device_of(host) == ("cpu", None)
        assert (host.device, host.is_cuda, host.is_cpu) == (torch.device("cpu"), False, True)
        assert device.device_of(x) == ("cuda", 1)
        assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (torch.device("cuda", 1), True, False, 1)
        assert fake.index_of(fake.cuda(host)) == 0
        assert fake.index_of(host) is None, "fake.cuda copies"
        assert fake.place(host, 1) is host
        assert fake.index_of(host) == 1
    assert device.device_of(x) == ("cpu", None)
    assert not x.is_cuda


def test_cuda_without_an_index_is_the_current_device() -> None:
    with FakeCuda() as fake:
        fake.current = 1
        assert torch.zeros(2, device="cuda").get_device() == 1
        assert torch.zeros(2).to("cuda").get_device() == 1
        assert fake.index_of(fake.cuda(torch.zeros(2))) == 1


@pytest.mark.parametrize(
    "derive",
    [
        lambda x: x[1:, ::2],
        lambda x: x.detach(),
        lambda x: x.t().contiguous(),
        lambda x: torch.empty_like(x),
        lambda x: x.new_zeros(3),
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.empty(3, device=x.device),
        lambda x: x.cuda(),
    ],
    ids=["view", "detach", "contiguous", "empty_like", "new_zeros", "dtype", "device=", "cuda()"],
)
def test_what_is_made_from_a_tensor_lives_with_it(derive: object) -> None:
    with FakeCuda() as fake:
        fake.current = 1
        assert fake.index_of(derive(torch.randn(4, 6, device="cuda:1"))) == 1  # type: ignore[operator]


def test_a_copy_between_devices_lives_at_its_target() -> None:
    with FakeCuda() as fake:
        x = torch.randn(3, device="cuda:1")
        for moved, home in ((x.to("cuda:0"), 0), (x.cuda(0), 0), (x.cpu(), None), (x.to("cpu"), None)):
            assert fake.index_of(moved) == home
            assert moved.data_ptr() != x.data_ptr()
            assert torch.equal(moved.cpu(), x.cpu())
        assert fake.index_of(x) == 1
        assert fake.index_of(torch.zeros(3).copy_(x)) is None


def test_two_devices_do_not_mix_in_one_operator() -> None:
    with FakeCuda(), pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        torch.add(torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1"))


def test_an_op_runs_forward_and_backward_on_the_operands_device() -> None:
    """N03, X07: device 1's memory and current stream are used, device 0 stays current and gets nothing."""
    with FakeCuda() as fake, recorded_launches(emulate) as launches, fake.on_stream(1, 77):
        x = fake.cuda(torch.randn(3, 4), 1).requires_grad_()
        y = Double.apply(x)
        assert isinstance(y, Tensor)
        (y * y).sum().backward()
        assert x.grad is not None
        assert fake.index_of(y) == fake.index_of(x.grad) == 1
        assert torch.equal(x.grad.cpu(), 8 * x.detach().cpu())
        assert [launch.library for launch in launches] == ["double_sm_90a", "double_sm_90a"]
        assert {(launch.index, launch.stream, launch.current_device) for launch in launches} == {(1, 77, 0)}
        assert launches[0].args[1] is x or launches[0].args[1].data_ptr() == x.data_ptr()
        assert {(a.index, a.stream) for a in fake.allocations} == {(1, 77)}
        assert [a.nbytes for a in fake.allocations if a.by == "runtime"] == [48, 64, 48, 64]


def test_an_allocation_on_the_wrong_device_is_seen() -> None:
    """N03: the log shows scratch that a careless op takes on the current device instead of its operand's."""
    with FakeCuda() as fake:
        x = fake.cuda(torch.randn(3), 1)
        fake.allocations.clear()
        workspace.take("double", "scratch", 64)
        torch.empty_like(x)
        torch.empty(5, device="cuda")
        assert [(a.index, a.by) for a in fake.allocations] == [(0, "runtime"), (1, "torch"), (0, "torch")]


@pytest.mark.parametrize(
    ("capability", "library"), [((8, 9), "double_sm_80"), ((9, 0), "double_sm_90a"), ((12, 0), "double_sm_80")]
)
def test_the_capability_decides_the_library(capability: tuple[int, int], library: str) -> None:
    with FakeCuda(capability=capability), recorded_launches() as launches:
        run(torch.randn(3, device="cuda"))
        assert [launch.library for launch in launches] == [library]


def test_a_cpu_tensor_runs_on_the_cpu_under_a_fake() -> None:
    with FakeCuda(), recorded_launches() as launches:
        assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
        assert launches == []


def test_the_recorder_refuses_operands_on_two_devices_or_on_the_cpu() -> None:
    with FakeCuda(), recorded_launches() as launches:
        program = PACKAGE.function("double_sm_80")
        here, there, host = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1"), torch.ones(2)
        for arguments in ((here, there), (here, host), (host, host), (3,)):
            with pytest.raises(ValueError, match="needs one CUDA device"):
                program(*arguments)
        program(here, None, 3)
        assert [launch.args[1:] for launch in launches] == [(None, 3)]


def test_the_recorder_knows_the_manifest() -> None:
    with recorded_launches(), pytest.raises(ValueError, match="did you mean 'double_sm_90a'"):
        PACKAGE.function("double_sm_90")


def test_a_program_that_an_op_kept_is_the_real_one_after_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    def real(package: KernelPackage, library: str, entry: str = "run") -> object:
        return lambda *args: (library, entry, args)

    monkeypatch.setattr(KernelPackage, "function", real)
    with FakeCuda(), recorded_launches() as launches:
        kept = PACKAGE.function("double_sm_80")
        kept(torch.ones(2, device="cuda"))
    assert kept(5) == ("double_sm_80", "run", (5,))
    assert len(launches) == 1
    assert KernelPackage.function is real


def test_memory_of_the_runtime_is_aligned_as_cuda_memory_is() -> None:
    with FakeCuda():
        for nbytes in (1, 100, 4096):
            assert device.empty(nbytes, 0).data_ptr() % 256 == 0
            assert device.empty(nbytes, 0).numel() == nbytes
        assert device.uninitialized((3, 5), torch.bfloat16, 1).stride() == (5, 1)


def test_current_device_and_streams_belong_to_the_thread() -> None:
    seen: list[tuple[int, int]] = []
    with FakeCuda() as fake, fake.on_stream(1, 9):
        fake.current = 1
        thread = threading.Thread(target=lambda: seen.append((device.current_device(), device.stream(1))))
        thread.start()
        thread.join()
        assert (device.current_device(), device.stream(1), device.stream(0)) == (1, 9, 0)
    assert seen == [(0, 0)]


def test_a_side_stream_is_current_inside_its_block_only() -> None:
    with FakeCuda() as fake:
        with device.side_stream(1) as handle:
            assert handle != 0
            assert (device.stream(1), device.stream(0), device.current_device()) == (handle, 0, 0)
            with fake.capture(1):
                assert device.capturing(1)
                assert not device.capturing(0)
        assert device.stream(1) == 0
        assert not device.capturing(1)


def test_a_device_that_does_not_exist_is_refused() -> None:
    with FakeCuda(devices=2) as fake:
        with pytest.raises(RuntimeError, match="cuda:2"):
            fake.current = 2
        for ask in (device.stream, device.capability, device.sm_count, device.synchronize):
            with pytest.raises(RuntimeError, match="cuda:5"):
                ask(5)
        with pytest.raises(RuntimeError, match="cuda:3"):
            torch.zeros(2, device="cuda:3")


def test_the_fake_answers_what_it_was_told() -> None:
    with FakeCuda(devices=3, capability=(10, 3), sm_count=148):
        device.synchronize()
        assert (device.device_count(), device.capability(2), device.sm_count(2)) == (3, (10, 3), 148)


def test_only_reads_of_fake_device_tensors_are_synchronisations() -> None:
    """R94: the guard under a fake device leaves CPU tensors alone and also sees a copy into CPU memory."""
    with FakeCuda():
        x, host = torch.randn(4, device="cuda"), torch.randn(4)
        with device.synchronize_forbidden():
            host.sum().item()
            host.to(x.device)
            host.clone().copy_(host)
            for read in (
                lambda: x.sum().item(),
                lambda: x.cpu(),
                lambda: x.to("cpu"),
                lambda: x.to(device="cpu", dtype=torch.float64),
                lambda: host.copy_(x),
                lambda: x[x > 0],
            ):
                with pytest.raises(RuntimeError, match="the host reads"):
                    read()


def test_a_tensor_of_one_fake_is_a_cpu_tensor_to_the_next() -> None:
    with FakeCuda():
        old = torch.ones(2, device="cuda:1")
    with FakeCuda() as fake:
        assert device.device_of(old) == ("cpu", None)
        assert fake.index_of(fake.cuda(old, 0)) == 0


def test_the_block_cannot_be_entered_twice_at_a_time() -> None:
    fake = FakeCuda()
    with fake, pytest.raises(RuntimeError, match="open already"), fake:
        pass
    with fake:
        assert fake.allocations == []
