"""backends/sm90.py and the public functions above it on the emulated kernels: ``gqa`` as a Hopper GPU would run it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cake_core import config
from cake_core.testing.cuda_on_cpu.emulation import Program
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.gates import assert_same_bits
from cake_core.testing.launches import Launch, recorded_launches
from cake_gqa import bwd_scratch_bytes, plan, varlen_gqa_attention, varlen_gqa_attention_bwd, varlen_gqa_attention_fwd
from cake_gqa.testing import oracle
from cake_gqa.testing.steps import Step, assert_accurate, assert_same_step, make_step
from torch import Tensor

FORWARD = ["gqa_plan", "gqa_fwd"]
BACKWARD = ["gqa_plan", "gqa_bwd_pre", "gqa_bwd_dkv", "gqa_bwd_dq"]


def names(launches: list[Launch]) -> list[str]:
    return [launch.library.removesuffix("_sm_90a") for launch in launches]


@pytest.fixture
def hopper(programs: dict[str, Program]) -> Callable[..., Any]:
    """A context of a fake device of capability 9.0 whose programs are the emulated ones; yields its launches."""

    def emulate(launch: Launch) -> None:
        programs[launch.library.removesuffix("_sm_90a")].run(*launch.args)

    @contextmanager
    def context() -> Generator[tuple[FakeCuda, list[Launch]]]:
        with FakeCuda(capability=(9, 0)) as fake, recorded_launches(emulate) as launches:
            yield fake, launches

    return context


def on(step: Step) -> Step:
    return step.to("cuda")


def host(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of results, which outlive the fake device."""
    return {name: torch.tensor(value.detach().float().tolist()).to(value.dtype) for name, value in outputs.items()}


STEPS: dict[str, dict[str, Any]] = {
    "plain": {"lengths": (70, (0, 0), 1, (30, 90)), "heads": (4, 2)},
    "window": {"lengths": (70, (0, 5), (4, 0)), "heads": (2, 2), "form": "window"},
    "add": {"lengths": (70, (0, 5), (4, 0)), "heads": (3, 1), "form": "add"},
    "scale": {"lengths": (65,), "heads": (2, 1), "scale": 0.05},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_definition(name: str, hopper: Any) -> None:
    step = make_step(**STEPS[name])
    with hopper() as (_, launches):
        got = host(on(step).run())
    backward = [*BACKWARD]
    if step.form == "add":
        backward.insert(3, "gqa_rowmap_add")
    assert names(launches) == FORWARD + backward
    assert_accurate(got, step.reference(), name, cancels="some")


@pytest.mark.parametrize("name", STEPS)
def test_autograd_gives_the_bits_of_the_passes(name: str, hopper: Any) -> None:
    step = make_step(**STEPS[name])
    with hopper():
        want = host(on(step).run())
        assert_same_step(host(on(step).differentiate()), want, name)


def test_fast_runs_det_s_programs(hopper: Any) -> None:
    step = make_step((70,), (2, 1))
    with hopper():
        want = host(on(step).run())
        config.configure(cake_gqa_variant="fast")
        assert_same_step(host(on(step).run()), want, "fast")


def test_only_the_gradients_that_are_needed_run(hopper: Any) -> None:
    step = make_step((70,), (2, 1))
    with hopper() as (_, launches):
        moved = on(step)
        saved = moved.forward()
        want = host(moved.backward(saved))
        for needs, programs, outputs in (
            ((True, False), ["gqa_plan", "gqa_bwd_pre", "gqa_bwd_dq"], ("dq",)),
            ((False, True), ["gqa_plan", "gqa_bwd_pre", "gqa_bwd_dkv"], ("dk", "dv")),
            ((False, False), [], ()),
        ):
            launches.clear()
            got = host(moved.backward(saved, needs=needs))
            assert names(launches) == programs
            assert tuple(got) == outputs
            assert_same_step(got, want, str(needs), outputs)


def test_passes_over_heads_give_the_same_sums(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that hold one or two heads of three at a time."""
    step = make_step((70, 20), (3, 3), form="add")
    with hopper() as (_, launches):
        moved = on(step)
        saved = moved.forward()
        want = host(moved.backward(saved))
        for heads in (1, 2):
            monkeypatch.setattr(plan, "MAX_WINDOW_BYTES", heads * 2048 * 90)
            launches.clear()
            assert_same_step(host(moved.backward(saved)), want, f"{heads} at a time")
            assert names(launches).count("gqa_rowmap_add") == -(-3 // heads)


def test_no_launch_where_there_is_no_pair(hopper: Any) -> None:
    for lengths in (((0, 5), (0, 0)), ((5, 0),), ((0, 0),)):
        step = make_step(lengths, (2, 1))
        with hopper() as (_, launches):
            got = host(on(step).run())
        assert not launches
        assert got["lse"].eq(-torch.inf).all()
        assert not any(bool(got[name].any()) for name in ("out", "dq", "dk", "dv"))


def test_given_outputs_are_written(hopper: Any) -> None:
    step = make_step((70,), (2, 1))
    with hopper():
        moved = on(step)
        want = host(moved.run())
        out, dq, dk, dv = (torch.full_like(t, torch.nan) for t in (moved.q, moved.q, moved.k, moved.v))
        lse = torch.full((2, 70), torch.nan, device="cuda")
        saved = moved.forward(out=out, lse=lse)
        assert saved["out"] is out
        moved.backward(saved, dq=dq, dk=dk, dv=dv)
        assert_same_step(host({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}), want, "given")


def test_scratch_is_what_the_plan_says(hopper: Any) -> None:
    for form, row_map in (("plain", False), ("add", True)):
        step = make_step((70, 20), (4, 2), form=form)
        with hopper() as (fake, launches):
            moved = on(step)
            saved = moved.forward()
            before = len(fake.allocations)
            moved.backward(saved, needs=(False, True))
            taken = sum(a.nbytes for a in fake.allocations[before:] if a.by == "runtime")
        outputs = 0 if row_map else 2 * step.k.numel() * 2
        wanted = bwd_scratch_bytes(90, 90, 4, 2, 2, variant="det", arch="sm_90a", row_map=row_map)
        assert taken == wanted + outputs
        assert launches


def test_a_captured_graph_serves_other_offsets(hopper: Any) -> None:
    """The launches of one call, replayed with other offsets of the same shapes in the same memory."""
    step = make_step((70, 20), (2, 1))
    with hopper() as (_, launches):
        moved = on(step)
        saved = moved.forward()
        grads = moved.backward(saved)
        recorded = list(launches)
        for cu in (moved.cu_q, moved.cu_k):
            cu.copy_(torch.tensor([0, 33, 90], dtype=torch.int32))
        for launch in recorded:
            launch.package.function(launch.library)(*launch.args)
        got = host(saved | grads)
    cu = torch.tensor([0, 33, 90], dtype=torch.int32)
    want = oracle.reference(step.q, step.k, step.v, step.dout, cu, cu)
    assert_accurate(got, {n: want[n] for n in got}, "replayed", cancels="some")


def test_a_gradient_that_is_expanded_or_transposed(hopper: Any) -> None:
    step = make_step((65,), (2, 1))
    with hopper():
        moved = on(step)
        for dout in (torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(moved.q),
                     moved.dout.transpose(0, 1).contiguous().transpose(0, 1)):  # fmt: skip
            got = host(replace(moved, dout=dout).differentiate())
            want = host(replace(moved, dout=dout.contiguous()).differentiate())
            assert_same_step(got, want, "dout")


def test_the_bound_changes_no_bit(hopper: Any) -> None:
    """Tiles come from the offsets: a bound that is too small or too large gives the same gradients."""
    step = make_step((150, 20), (2, 1))
    with hopper():
        want = host(on(step).run())
        for bound in (1, 149, 170, 10_000):
            assert_same_step(host(replace(on(step), bound=bound).run()), want, f"bound {bound}")


def test_what_is_refused_launches_nothing(hopper: Any) -> None:
    step = make_step((70,), (2, 1))
    with hopper() as (fake, launches):
        q, k, v = (fake.cuda(t) for t in (step.q, step.k, step.v))
        cu = fake.cuda(step.cu_q)
        for wrong in (q.float(), q.half()):
            with pytest.raises(ValueError, match="q is"):
                varlen_gqa_attention(wrong, k, v, cu, cu, max_seqlen_k=70)
        with pytest.raises(ValueError, match="k"):
            varlen_gqa_attention_fwd(q, step.k, v, cu, cu)
        with pytest.raises(ValueError, match="lse"):
            varlen_gqa_attention_bwd(q, k, v, q, fake.cuda(torch.zeros(70, 2)), q, cu, cu, max_seqlen_k=70)
        assert not launches


def test_other_devices_have_no_kernels() -> None:
    step = make_step((5,), (2, 1))
    for capability in ((8, 0), (12, 0)):
        with FakeCuda(capability=capability) as fake, recorded_launches() as launches:
            operands = [fake.cuda(t) for t in (step.q, step.k, step.v, step.cu_q, step.cu_k)]
            with pytest.raises(NotImplementedError, match="sm_90a"):
                varlen_gqa_attention(*operands, max_seqlen_k=5)
            assert not launches


def test_the_same_bits_from_a_pooled_workspace(hopper: Any) -> None:
    """Scratch that holds what earlier calls left."""
    big, step = make_step((130, 40), (2, 1), form="add"), make_step((70,), (2, 1), form="add")
    with hopper():
        want = host(on(step).run())
        config.configure(cake_workspace_pool_bytes=1 << 26)
        on(big).run()
        for _ in range(2):
            got = host(on(step).run())
            for name in want:
                assert_same_bits(got[name], want[name], name)
