"""The workspace pool over fake CUDA devices."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from cake_core import configure, device, workspace
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.host_time import ALLOCATION, PYTHON_CALL, ROOM, timed, work
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with FakeCuda(devices=2) as installed:
        yield installed


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def bound(nbytes: int) -> None:
    configure(cake_workspace_pool_bytes=nbytes)


def take(role: str, nbytes: int, index: int | None = None) -> Tensor:
    return workspace.take("demo", role, nbytes, index)


class Counted:
    """What ``stats`` counted since this object was made."""

    def __init__(self) -> None:
        self.before = workspace.stats()

    def __call__(self, *names: str) -> tuple[int, ...]:
        now = workspace.stats()
        return tuple(now[name] - self.before[name] for name in names)


def held() -> dict[int, int]:
    return workspace.stats()["held"]


def test_without_a_bound_every_take_is_an_allocation_and_nothing_is_kept(fake: FakeCuda) -> None:
    """R62: bound 0, the default."""
    counted = Counted()
    kept = [take("a", 128, 1) for _ in range(3)]
    assert len({buffer.data_ptr() for buffer in kept}) == 3
    assert [(a.index, a.nbytes) for a in fake.allocations] == [(1, 128)] * 3
    assert (workspace.stats()["entries"], held()) == (0, {})
    assert workspace.release_pool() == 0
    assert counted("requests", "bypassed", "hits", "misses") == (3, 3, 0, 0)


def test_without_a_bound_the_current_stream_of_the_device_is_used(fake: FakeCuda) -> None:
    """R62: a plain allocation on the current stream."""
    with fake.on_stream(1, 5):
        take("a", 16, 1)
    assert [(a.index, a.stream) for a in fake.allocations] == [(1, 5)]


class Immediate(device.Backend):
    """Answers at once, so that what remains is the cost of ``take`` itself."""

    buffer = torch.empty(64, dtype=torch.uint8)

    def empty(self, nbytes: int, index: int) -> Tensor:
        return self.buffer


def test_without_a_bound_take_adds_150_ns_to_the_allocation() -> None:
    """R63: 70 on an idle machine; the count leaves no room."""

    def ours() -> Tensor:
        return workspace.take("demo", "a", 64, 0)

    with device.installed(Immediate()):
        ours()
        found = work(ours)
        assert found.functions <= 3
        assert found.instructions <= 48
        assert timed(ours, [lambda: device.empty(64, 0)], enough=150).nanoseconds <= 150


class Bindings:
    """torch's three queries, answered by builtins, and which of them were made."""

    def __init__(self, handle: int, *, current: int = 0, capturing: bool = False) -> None:
        self._cuda_getCurrentRawStream = {0: handle, 1: handle}.__getitem__
        self._cuda_getDevice = iter(itertools.repeat(current)).__next__
        self._cuda_isCurrentStreamCapturing = iter(itertools.repeat(capturing)).__next__


def torch_backend(bindings: object) -> device.Backend:
    """The backend of a process without a fake, with other bindings and the CPU to allocate on."""

    class Bound(type(device.backend)):
        def _bind(self) -> object:
            self._bindings = bindings
            return bindings

        def torch_device(self, index: int) -> torch.device:
            return torch.device("cpu")

    return Bound()


def test_the_default_stream_is_asked_nothing_more() -> None:
    """R69, R70: CUDA cannot capture it; any other stream is asked, on the device it belongs to."""
    assert torch_backend(Bindings(0, capturing=True)).uncaptured_stream(1) == 0
    assert torch_backend(Bindings(7, current=1)).uncaptured_stream(1) == 7
    assert torch_backend(Bindings(7, current=1, capturing=True)).uncaptured_stream(1) is None
    elsewhere = torch_backend(Bindings(7, current=0, capturing=True))
    asked: list[int] = []
    elsewhere.capturing = lambda index: bool(asked.append(index)) or True  # type: ignore[method-assign]
    assert elsewhere.uncaptured_stream(1) is None
    assert asked == [1]


@pytest.mark.parametrize("handle", [0, 0x55AA00])
def test_a_hit_adds_500_ns_to_what_it_asks_torch(handle: int) -> None:
    """R64: the default stream and another one; 350 ns on an idle machine, and the count leaves no room."""
    bindings = Bindings(handle)
    queries = [lambda: bindings._cuda_getCurrentRawStream(0)]
    if handle:
        queries += [bindings._cuda_getDevice, bindings._cuda_isCurrentStreamCapturing]

    def ours() -> Tensor:
        return workspace.take("demo", "a", 64, 0)

    bound(1000)
    with device.installed(torch_backend(bindings)):
        first = take("a", 64, 0)
        found = work(ours)
        assert found.functions <= 6
        assert found.instructions <= (108 if handle else 96)
        counted = Counted()
        added = timed(ours, queries, enough=500)
        assert counted("hits") == (added.calls,)
        assert take("a", 64, 0) is first
        assert added.nanoseconds <= 500


class OnTheHost(device.Backend):
    """The real backend with another place to allocate in."""

    def torch_device(self, index: int) -> torch.device:
        return torch.device("cpu")


def test_scratch_and_outputs_cost_120_ns_more_than_torch_empty() -> None:
    """R63: the whole way down, next to torch.empty with a torch.device made once. 60 to 90 ns on an idle machine; with
    room, for it is the difference of two microseconds. The count leaves none."""
    cpu = torch.device("cpu")
    cases = (
        (
            lambda: torch.empty(64, dtype=torch.uint8, device=cpu),
            lambda: workspace.take("demo", "a", 64, 0),
            (5, 62),
        ),
        (
            lambda: torch.empty((4, 64), dtype=torch.bfloat16, device=cpu),
            lambda: workspace.uninitialized((4, 64), torch.bfloat16, 0),
            (6, 44),
        ),
    )
    with device.installed(OnTheHost()):
        for plain, ours, (functions, instructions) in cases:
            ours()
            found = work(ours)
            assert found.functions <= functions
            assert found.instructions <= instructions
            assert timed(ours, [plain], like=(PYTHON_CALL, ALLOCATION), enough=ROOM * 120).nanoseconds <= ROOM * 120


@pytest.mark.parametrize("first", [False, True])
def test_the_real_backend_gives_what_torch_empty_gives_and_never_fills(first: bool) -> None:
    """R74: at the first call of a dtype, which remembers, and later, with deterministic mode switched in between."""
    shapes: tuple[tuple[int, ...], ...] = ((), (3, 0, 5), torch.Size((7, 4)), (1,))
    torch.use_deterministic_algorithms(True)
    for dtype in (torch.float64, torch.uint8):  # the first one of a dtype makes the tensor that is copied
        workspace.uninitialized((1,), dtype, "cpu")
    with device.installed(OnTheHost()):
        for mode in (first, not first, first):
            torch.use_deterministic_algorithms(mode)
            try:
                with profile(activities=[ProfilerActivity.CPU]) as trace:
                    got = [workspace.uninitialized(shape, torch.float64, 0) for shape in shapes]
                    got.append(workspace.take("demo", "a", 96, 0))
            finally:
                torch.use_deterministic_algorithms(False)
            assert [event.name for event in trace.events() or () if "fill" in event.name] == []
            want = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
            want.append(torch.empty(96, dtype=torch.uint8))
            for ours, plain in zip(got, want, strict=True):
                assert (ours.shape, ours.stride(), ours.dtype) == (plain.shape, plain.stride(), plain.dtype)
                assert (ours._base, ours.requires_grad) == (None, False)


class Named(Tensor):
    """A class of its own, which torch passes on to what it derives from it."""


@pytest.mark.parametrize("first", [False, True])
def test_an_output_like_an_operand_is_dense_plain_and_never_filled(first: bool) -> None:
    """R74: whatever the strides, the class and the mode; strides of a single row are those of a dense tensor."""
    wide = torch.ones(7, 24, dtype=torch.bfloat16)
    operands = [
        wide,
        torch.nn.Parameter(wide),
        wide.as_subclass(Named),
        wide[:, 8:16],
        wide[:1, :8],
        wide.t(),
        wide[:0],
        wide.view(7, 3, 8),
        wide.float()[0, 0],
    ]
    torch.use_deterministic_algorithms(True)
    for dtype in (torch.bfloat16, torch.float32):  # the first one of a dtype makes the tensor that is copied
        workspace.uninitialized((1,), dtype, "cpu")
    with device.installed(OnTheHost()):
        for mode in (first, not first, first):
            torch.use_deterministic_algorithms(mode)
            try:
                with profile(activities=[ProfilerActivity.CPU]) as trace:
                    got = [workspace.uninitialized_like(operand, 0) for operand in operands]
            finally:
                torch.use_deterministic_algorithms(False)
            assert [event.name for event in trace.events() or () if "fill" in event.name] == []
            for ours, operand in zip(got, operands, strict=True):
                plain = torch.empty(operand.shape, dtype=operand.dtype)
                assert (type(ours), ours.shape, ours.stride()) == (Tensor, plain.shape, plain.stride())
                assert (ours.dtype, ours._base, ours.requires_grad) == (plain.dtype, None, False)


def test_an_output_like_an_operand_lives_on_its_device(fake: FakeCuda) -> None:
    operand = fake.cuda(torch.ones(3, 8), 1)
    fake.allocations.clear()
    assert fake.index_of(workspace.uninitialized_like(operand, 1)) == 1
    assert [(a.index, a.nbytes, a.by) for a in fake.allocations] == [(1, 96, "runtime")]


def test_what_a_tensor_mode_makes_is_not_remembered() -> None:
    """A first call under fake tensors leaves nothing behind; one in inference mode leaves an ordinary maker."""
    with device.installed(OnTheHost()):
        with FakeTensorMode():
            assert isinstance(workspace.take("demo", "a", 8, 0), FakeTensor)
            assert isinstance(workspace.uninitialized((2,), torch.float32, 0), FakeTensor)
        with torch.inference_mode():
            workspace.take("demo", "a", 8, 0)
            workspace.uninitialized((2,), torch.float32, 0)
        for tensor in (workspace.take("demo", "a", 8, 0), workspace.uninitialized((2,), torch.float32, 0)):
            assert type(tensor) is Tensor
            assert not tensor.is_inference()


def test_a_bound_keeps_one_buffer_per_role_and_gives_it_whole(fake: FakeCuda) -> None:
    """R64: a smaller or equal request is a hit on the same memory."""
    bound(1000)
    first = take("a", 100)
    counted = Counted()
    for nbytes in (100, 1, 60):
        again = take("a", nbytes)
        assert again.data_ptr() == first.data_ptr()
        assert again.numel() == 100
    assert counted("hits", "misses") == (3, 0)
    assert len(fake.allocations) == 1


class FreesMeanwhile(FakeCuda):
    """Another thread empties the pool while this one asks for its stream."""

    armed = False

    def uncaptured_stream(self, index: int) -> int | None:
        if self.armed:
            self.armed = False
            thread = threading.Thread(target=workspace.release_pool)
            thread.start()
            thread.join()
        return super().uncaptured_stream(index)


def test_a_buffer_that_another_thread_frees_before_the_look_up_is_allocated_anew() -> None:
    """R66, R71: a hit takes no lock, so its buffer may go at any time."""
    bound(1000)
    with FreesMeanwhile() as fake:
        first = take("a", 100)
        fake.armed = True
        counted = Counted()
        assert take("a", 100).data_ptr() != first.data_ptr()
        assert counted("hits", "misses", "requests") == (0, 1, 1)
        assert held() == {0: 100}


def test_a_buffer_that_another_thread_frees_after_the_look_up_stays_with_its_caller_alone(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R66, R71: the books are those of a hit followed by the eviction; the pool does not get the buffer back."""
    bound(1000)
    first, draw = take("a", 100), workspace._use

    def freed_first() -> int:
        monkeypatch.setattr(workspace, "_use", draw)
        thread = threading.Thread(target=take, args=("b", 1000))
        thread.start()
        thread.join()
        return draw()

    monkeypatch.setattr(workspace, "_use", freed_first)
    counted = Counted()
    assert take("a", 100).data_ptr() == first.data_ptr()
    assert counted("hits", "misses", "evicted", "entries") == (1, 1, 1, 0)
    assert held() == {0: 1000}
    assert take("a", 100).data_ptr() != first.data_ptr()


def test_a_hit_takes_no_lock(fake: FakeCuda) -> None:
    """R63: the lock would cost as much as the rest of it."""
    bound(1000)
    first = take("a", 100)

    def others() -> None:
        with workspace._lock:
            holding.set()
            assert done.wait(10)

    holding, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=others)
    thread.start()
    assert holding.wait(10)
    threading.Timer(5, done.set).start()  # a hit that waits ends later than this
    try:
        assert take("a", 64).data_ptr() == first.data_ptr()
        assert not done.is_set()
    finally:
        done.set()
        thread.join()


def test_a_larger_request_replaces_the_buffer(fake: FakeCuda) -> None:
    """R64: the old buffer does not stay beside the new one."""
    bound(1000)
    take("a", 100)
    counted = Counted()
    assert take("a", 300).numel() == 300
    assert counted("misses", "entries", "evicted") == (1, 0, 0)
    assert held() == {0: 300}


def test_streams_devices_roles_and_ops_do_not_share(fake: FakeCuda) -> None:
    """R65: every part of the key separates buffers."""
    bound(10_000)
    pointers = [take("a", 64, 0), take("a", 64, 1), take("b", 64, 0), workspace.take("other", "a", 64, 0)]
    with fake.on_stream(0, 3):
        pointers.append(take("a", 64, 0))
    assert len({buffer.data_ptr() for buffer in pointers}) == 5
    assert workspace.stats()["entries"] == 5


def test_threads_that_share_a_stream_do_not_share_buffers(fake: FakeCuda) -> None:
    """R65: same device, same stream, same role, two threads."""
    bound(10_000)
    mine, theirs = take("a", 64), list[Tensor]()
    thread = threading.Thread(target=lambda: theirs.extend([take("a", 64), take("a", 64)]))
    thread.start()
    thread.join()
    assert theirs[0].data_ptr() == theirs[1].data_ptr() != mine.data_ptr()


def test_a_request_above_the_bound_is_served_and_not_kept(fake: FakeCuda) -> None:
    """R66: the small buffer of the same role stays."""
    bound(100)
    small = take("a", 60)
    counted = Counted()
    assert take("a", 101).numel() == 101
    assert counted("bypassed", "evicted") == (1, 0)
    assert held() == {0: 60}
    assert take("a", 60).data_ptr() == small.data_ptr()
    assert take("b", 100).numel() == 100
    assert held() == {0: 100}, "a request equal to the bound is kept"


def test_the_least_recently_used_buffer_goes_first(fake: FakeCuda) -> None:
    """R67: a hit makes a buffer recent and evicts nothing."""
    bound(300)
    buffers = {role: take(role, 100) for role in "abc"}
    counted = Counted()
    take("a", 100)
    assert counted("evicted") == (0,)
    take("d", 100)
    assert counted("evicted") == (1,)
    for role in "ac":
        assert take(role, 100).data_ptr() == buffers[role].data_ptr()
    assert counted("misses", "hits", "evicted") == (1, 3, 1)
    take("b", 200)
    assert counted("misses", "evicted") == (2, 3), "b was the evicted one; d and a make room for it"
    assert take("c", 100).data_ptr() == buffers["c"].data_ptr()
    assert held() == {0: 300}


def test_eviction_on_one_device_leaves_the_other_alone(fake: FakeCuda) -> None:
    """R67: the bound is per device."""
    bound(100)
    first = take("a", 100, 1)
    take("a", 100, 0)
    take("b", 100, 0)
    assert take("a", 100, 1).data_ptr() == first.data_ptr()
    assert held() == {0: 100, 1: 100}


@pytest.mark.parametrize("request_of", ["hit", "miss", "above the bound", "empty"])
def test_a_lowered_bound_is_in_force_at_the_next_request(fake: FakeCuda, request_of: str) -> None:
    """R68: on every device, whatever the next request is."""
    bound(300)
    for index in (0, 1):
        for role in "abc":
            take(role, 100, index)
    bound(150)
    assert held() == {0: 300, 1: 300}
    take(*{"hit": ("c", 100), "miss": ("d", 40), "above the bound": ("d", 400), "empty": ("d", 0)}[request_of], 0)
    assert all(nbytes <= 150 for nbytes in held().values())
    assert held()[1] == 100


@pytest.mark.parametrize("other", ["a", "b"])
def test_what_a_finaliser_takes_inside_of_an_allocation_stays_in_the_books(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """The same role and another one: the bound holds, and what is counted is what is held."""
    bound(100)
    allocate, started = fake.empty, False

    def interrupted(nbytes: int, index: int) -> Tensor:
        nonlocal started
        if not started:
            started = True
            take(other, 30, 0)
        return allocate(nbytes, index)

    monkeypatch.setattr(fake, "empty", interrupted)
    kept = take("a", 80, 0)
    assert held() == {0: 80}
    assert workspace.stats()["entries"] == 1
    assert take("a", 80, 0) is kept


def test_a_bound_lowered_to_0_empties_the_pool(fake: FakeCuda) -> None:
    """R68: and raising it again starts afresh."""
    bound(300)
    first = take("a", 100)
    configure()
    assert take("a", 100).data_ptr() != first.data_ptr()
    assert (held(), workspace.stats()["entries"]) == ({}, 0)
    bound(300)
    take("a", 100)
    assert held() == {0: 100}


def test_a_capturing_stream_takes_nothing_from_the_pool_and_leaves_nothing(fake: FakeCuda) -> None:
    """R69: both directions; another stream of the device goes on using the pool."""
    bound(1000)
    pooled = take("a", 100)
    counted = Counted()
    with fake.capture(0):
        captured = [take("a", 100), take("b", 100)]
        with fake.on_stream(0, 4):
            take("a", 100)
    assert counted("captured", "hits", "misses") == (2, 0, 1)
    assert pooled.data_ptr() not in {buffer.data_ptr() for buffer in captured}
    assert held() == {0: 200}
    assert take("a", 100).data_ptr() == pooled.data_ptr()
    assert take("b", 100).data_ptr() != captured[1].data_ptr()


def test_a_device_that_is_not_current_is_asked_for_its_own_stream_and_capture(fake: FakeCuda) -> None:
    """R70: stream and capture state of the device named, not of the current one."""
    bound(1000)
    with fake.on_stream(1, 7):
        on_7 = take("a", 100, 1)
    on_default = take("a", 100, 1)
    assert on_7.data_ptr() != on_default.data_ptr()
    assert [(a.index, a.stream) for a in fake.allocations] == [(1, 7), (1, 0)]
    with fake.capture(0):
        assert take("a", 100, 1).data_ptr() == on_default.data_ptr()
    counted = Counted()
    with fake.capture(1):
        take("a", 100, 1)
    assert counted("captured") == (1,)


def test_no_device_named_is_the_current_one(fake: FakeCuda) -> None:
    """R70: at bound 0 and with a bound."""
    fake.current = 1
    for nbytes in (0, 1000):
        bound(nbytes)
        take("a", 100)
    assert {a.index for a in fake.allocations} == {1}
    assert held() == {1: 100}


def test_eight_threads_leave_the_books_consistent(fake: FakeCuda) -> None:
    """R71: held bytes equal the sum over the entries, and every request is counted."""
    bound(5000)
    counted = Counted()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(200):
                nbytes = 1 + (seed * 7919 + step * 104729) % 3000
                assert take("abc"[step % 3], nbytes, step % 2).numel() >= nbytes
                assert all(size <= 5000 for size in held().values())
                if step % 50 == 49:
                    workspace.release_pool()
                if seed == 0 and step % 20 == 0:
                    bound((0, 5000, 2000)[step // 20 % 3])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places in the middle of a request
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert counted("requests") == (1600,)
    sizes = dict.fromkeys((0, 1), 0)
    for (index, *_), buffer in workspace._buffers.items():
        sizes[index] += buffer.size
    assert held() == {index: size for index, size in sizes.items() if size}
    assert all(size <= 5000 for size in sizes.values())


class Slow(FakeCuda):
    """Its allocations take long enough for another thread to come in between."""

    def empty(self, nbytes: int, index: int) -> Tensor:
        time.sleep(0.05)
        return super().empty(nbytes, index)


def test_two_threads_that_allocate_at_once_stay_within_the_bound() -> None:
    """R71, R66: room that one thread made is not used by the other."""
    bound(100)
    with Slow():
        threads = [threading.Thread(target=take, args=("a", 60, 0)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (held(), workspace.stats()["entries"]) == ({0: 60}, 1)


def test_stats_add_up(fake: FakeCuda) -> None:
    """R72: every request is in exactly one class."""
    counted = Counted()
    take("a", 10)
    bound(100)
    take("a", 10)
    take("a", 10)
    take("a", 101)
    take("a", 0)
    take("b", 95, 1)
    take("c", 95, 1)
    with fake.capture(0):
        take("a", 10)
    names = ("requests", "hits", "misses", "bypassed", "captured", "evicted", "entries")
    assert counted(*names) == (8, 1, 3, 3, 1, 1, 2)
    assert held() == {0: 10, 1: 95}
    assert workspace.stats() == workspace.stats(), "reading counts nothing"
    assert workspace.release_pool() == 105
    assert (held(), workspace.stats()["entries"]) == ({}, 0)


@pytest.mark.parametrize("nbytes", [0, 1000])
def test_an_empty_request_gives_an_empty_tensor_and_keeps_nothing(fake: FakeCuda, nbytes: int) -> None:
    """R73: with and without a bound."""
    bound(nbytes)
    empty = take("a", 0, 1)
    assert (empty.numel(), empty.dtype, fake.index_of(empty)) == (0, torch.uint8, 1)
    assert workspace.stats()["entries"] == 0


@pytest.mark.parametrize("pool", [0, 1000])
@pytest.mark.parametrize(
    ("nbytes", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), ("8", TypeError), (None, TypeError)]
)
def test_a_size_that_is_no_count_is_refused(fake: FakeCuda, pool: int, nbytes: object, error: type) -> None:
    """R73: negative or not an int."""
    bound(pool)
    with pytest.raises(error, match="take: nbytes is"):
        take("a", nbytes)  # type: ignore[arg-type]
    assert fake.allocations == []


@pytest.mark.parametrize("pool", [0, 4096])
def test_a_buffer_is_uint8_in_one_dimension_and_aligned(fake: FakeCuda, pool: int) -> None:
    """R64: the contract of every ``take``."""
    bound(pool)
    buffer = take("a", 777)
    assert (buffer.dtype, buffer.shape, buffer.data_ptr() % 256) == (torch.uint8, (777,), 0)


@pytest.mark.parametrize("pool", [0, 1 << 20])
def test_deterministic_mode_does_not_fill_a_buffer(fake: FakeCuda, pool: int, deterministic: None) -> None:
    """R74: torch.empty is filled with 0xFF in this mode; for a buffer no fill operator runs."""
    bound(pool)
    workspace.uninitialized((1,), torch.float32, "cpu")  # the first one of a dtype makes the tensor that is copied
    take("first", 1)
    assert bool((torch.empty(1 << 16, dtype=torch.uint8) == 0xFF).all()), "the trap that take avoids"
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for role in "abcd":
            take(role, 1 << 16)
        for where in ("cpu", "cuda:1"):
            workspace.uninitialized((1 << 14,), torch.float32, where)
    events = trace.events()
    assert events is not None
    assert [event.name for event in events if "fill" in event.name] == []


def test_an_uninitialized_tensor_lives_where_it_is_asked_to(fake: FakeCuda) -> None:
    """R74: index, string and torch.device; "cuda" is the current device."""
    fake.current = 1
    homes: list[tuple[object, int | None]] = [
        (0, 0),
        ("cuda:0", 0),
        (torch.device("cuda", 1), 1),
        ("cuda", 1),
        ("cpu", None),
        (torch.device("cpu"), None),
    ]
    for where, home in homes:
        tensor = workspace.uninitialized((2, 3), torch.bfloat16, where)  # type: ignore[arg-type]
        assert fake.index_of(tensor) == home
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((2, 3), torch.bfloat16, True)


def test_leaving_a_fake_device_drops_its_buffers() -> None:
    """R65: a buffer of one backend is never handed to another."""
    bound(1000)
    with FakeCuda():
        inside = take("a", 100)
    assert workspace.stats()["entries"] == 0
    with FakeCuda():
        assert take("a", 100).data_ptr() != inside.data_ptr()
