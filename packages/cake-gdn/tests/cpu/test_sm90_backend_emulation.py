"""backends/sm90.py and the public functions above it on the emulated kernels: ``gdn`` as a Hopper GPU would run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gdn_emulation
import pytest
import torch
from cake_core.kcp.upload import Upload
from cake_core.testing.cuda_on_cpu.emulation import Program, compile_program
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.gates import assert_same_bits, poisoned_empty
from cake_core.testing.launches import Launch, recorded_launches
from cake_gdn import (
    api,
    backends,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    packed_qkv_views,
)
from cake_gdn.backends import sm90
from cake_gdn.testing.steps import Step, assert_accurate, assert_same_step, make_step
from torch import Tensor


@pytest.fixture(scope="session")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(compile_program(gdn_emulation.CSRC, "gdn_meta", Path(tmp_path_factory.mktemp("meta"))))


@pytest.fixture
def launched(programs: dict[str, Program], meta: Program, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call runs the Hopper backend on CPU tensors, fresh memory is NaN; the programs that ran."""
    ran: list[str] = []
    known = {**programs, "gdn_meta": meta}

    def program(name: str, index: int) -> Any:
        ran.append(name)
        return known[f"gdn_{name}"].run

    def uninitialized(shape: Sequence[int], dtype: torch.dtype, index: int) -> Tensor:
        return poisoned_empty(tuple(shape), dtype, "cpu")

    monkeypatch.setattr(sm90, "_program", program)
    monkeypatch.setattr(sm90, "_index", lambda x: 0)

    def take(op: str, role: str, nbytes: int, index: int) -> Tensor:
        return poisoned_empty((nbytes + 3,), torch.uint8, "cpu")

    monkeypatch.setattr(sm90, "workspace", SimpleNamespace(uninitialized=uninitialized, take=take))
    monkeypatch.setattr(sm90, "device", SimpleNamespace(capturing=lambda index: False))
    monkeypatch.setattr(sm90, "Upload", lambda tables, device: Upload(tables, torch.device("cpu")))
    monkeypatch.setattr(backends, "select", lambda *arguments: sm90)
    sm90.release()
    return ran


@pytest.fixture
def on_device(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Offsets are known to the device alone."""
    tables = sm90._tables

    def blind(x: Any, *arguments: Any) -> Any:
        return tables(x._replace(docs=x.docs._replace(host=None)), *arguments)

    monkeypatch.setattr(sm90, "_tables", blind)
    return launched


STEPS: dict[str, dict[str, Any]] = {
    "states": {"lengths": (70, 0, 1, 65), "heads": (1, 2), "state": True},
    "values-first": {"lengths": (70, 10), "heads": (1, 1), "state": True, "v_first": True},
    "padding": {"lengths": (64, 40), "heads": (2, 2), "padding": 30, "beta": "bfloat16"},
    "packed-no-norm": {"lengths": (100,), "heads": (1, 3), "packed": True, "norm": False},
    "batch": {"lengths": (70, 70), "heads": (1, 2), "batch": True, "gates": "qwen-1"},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_definition(name: str, launched: list[str]) -> None:
    given = STEPS[name]
    step = make_step(**given)
    got = step.run()
    assert launched == ["prep", "state_scan", "adjoint_scan", "tail"]
    if given.get("padding"):
        first = sum(given["lengths"])
        for output in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert not got[output][:, first:].any(), output
        step = replace(step, **{n: getattr(step, n)[:, :first] for n in ("q", "k", "v", "g", "beta", "do")})
        got = {n: t[:, :first] if n in ("o", "dq", "dk", "dv", "dg", "dbeta") else t for n, t in got.items()}
    assert_accurate(got, step.reference(), name, gates=given.get("gates", ""))


def test_what_the_forward_keeps_does_not_change_a_bit(launched: list[str]) -> None:
    step = make_step((65, 20), (1, 2), state=True)
    want = step.run(save="full")
    launched.clear()
    assert_same_step(step.run(save="light"), want, "light")
    assert launched == ["prep", "state_scan", "state_scan", "adjoint_scan", "tail"]
    assert_same_step(step.run(save="none"), want, "none")
    assert_same_step(step.differentiate(), want, "autograd")


def test_a_negated_view_is_read_as_what_it_says(launched: list[str]) -> None:
    """The imaginary part of a conjugate: FP32 whose memory holds the numbers with the other sign."""

    def negated(x: Tensor | None) -> Tensor:
        assert x is not None
        view = torch.complex(torch.zeros_like(x.float()), -x.float()).conj().imag
        assert view.is_neg()
        return view

    step = make_step((65, 20), (1, 2), state=True)
    step = replace(step, beta=step.beta.float())
    other = replace(step, g=negated(step.g), beta=negated(step.beta), state=negated(step.state), dht=negated(step.dht))
    assert_same_step(other.run(), step.run(), "negated")


def test_offsets_that_the_device_alone_knows_give_the_same_bits(
    launched: list[str], request: pytest.FixtureRequest
) -> None:
    step = make_step((70, 0, 64, 1), (1, 2), state=True, padding=9)
    want = step.run()
    launched.clear()
    request.getfixturevalue("on_device")
    assert_same_step(step.run(), want, "tables of the device")
    assert launched.count("meta") == 2, "the tables of a forward serve its preparation and its scan"


def test_tables_of_many_documents(launched: list[str]) -> None:
    """More documents than threads of the table kernel: chunks go on behind the first thousand."""
    lengths = (1, 0, 2) * 400 + (70,)
    step = make_step(lengths, (1, 1))
    x = SimpleNamespace(v=step.v[0], docs=SimpleNamespace(host=None, cu=step.cu, count=len(lengths)))
    got = sm90._tables(x, 0, None, tuple(range(len(lengths))))  # pyright: ignore[reportArgumentType]
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    want = gdn_emulation.chunk_table(cu)
    assert_same_bits(got.chunks[: len(want)], want, "chunks")
    assert not got.chunks[len(want) :, 1].any()
    chunks = torch.tensor([-(-n // 64) for n in lengths])
    for column, values in enumerate((cu[:-1], lengths, (chunks.cumsum(0) - chunks).tolist())):
        assert got.segments[:, column].tolist() == list(values)
    assert got.segments[:, 3:].tolist() == [[-1, n] for n in range(len(lengths))]


@pytest.mark.parametrize("broken", [(0, 50, 20, 70), (-7, 30, 900, 60), (60, 10), (0, 2**31 - 1, -(2**31))])
def test_wrong_offsets_stay_inside_of_the_tokens(broken: tuple[int, ...], launched: list[str], meta: Program) -> None:
    tokens, documents = 70, len(broken) - 1
    chunks, segments = torch.full((4, 2), -9, dtype=torch.int32), torch.full((documents, 5), -9, dtype=torch.int32)
    meta.run(chunks, segments, torch.tensor(broken, dtype=torch.int32), tokens, 0, 0)
    for first, rows in chunks.tolist():
        assert 0 <= rows <= 64
        assert rows == 0 or (first >= 0 and first + rows <= tokens)
    for first, length, chunk, *_ in segments.tolist():
        assert first >= 0
        assert 0 <= length <= tokens - first
        assert chunk + -(-length // 64) <= len(chunks)


def test_only_the_gradients_that_are_needed_run(launched: list[str]) -> None:
    step = make_step((70,), (1, 2), state=True)
    want = step.run()
    _, saved = step.forward()
    launched.clear()
    got = step.backward(saved, needs=(False, False, True, False, False, True))
    assert launched == ["adjoint_scan"]
    assert_same_step(got, want, "dv and dh0", ("dv", "dh0"))
    got = step.backward(saved, needs=(False, True, False, False, False, False))
    assert_same_step(got, want, "dk alone", ("dk",))


def test_one_packed_gradient_comes_back(launched: list[str]) -> None:
    qkv = make_step((70,), (1, 6)).v.flatten(2).requires_grad_()
    step = make_step((70,), (2, 2))
    q, k, v = packed_qkv_views(qkv, num_qk_heads=2, num_v_heads=2)
    o, _ = chunk_gated_delta_rule(q, k, v, step.g, step.beta, use_qk_l2norm_in_kernel=True)
    (packed,) = torch.autograd.grad(o, (qkv,), step.do)
    alone = replace(step, q=q.detach().clone(), k=k.detach().clone(), v=v.detach().clone(), cu=None).run()
    for name, part in zip(("dq", "dk", "dv"), packed.unflatten(-1, (-1, 128)).split([2, 2, 2], 2), strict=True):
        assert_same_bits(part, alone[name], name)


def test_a_layout_is_uploaded_once(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[int] = []
    upload = sm90.Upload

    def counted(*arguments: Any) -> Upload:
        uploads.append(1)
        return upload(*arguments)

    monkeypatch.setattr(sm90, "Upload", counted)
    step = make_step((65, 3), (1, 1), state=True)
    step.run()
    first = len(uploads)
    step.run()
    assert len(uploads) == first
    api.release()
    step.run()
    assert len(uploads) == 2 * first


def test_a_layout_cannot_be_met_first_while_a_graph_is_captured(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm90.device, "capturing", lambda index: True)
    with pytest.raises(RuntimeError, match="while a graph is captured"):
        make_step((65,), (1, 1)).run()


def test_no_tokens(launched: list[str]) -> None:
    step = make_step((0, 0), (1, 2), state=True)
    got = step.run()
    assert not launched
    assert step.state is not None
    assert step.dht is not None
    assert_same_bits(got["final_state"], step.state, "final state")
    assert_same_bits(got["dh0"], step.dht, "dh0")


# --- what is refused, on a fake device of compute capability 9.0 ---------------------------------------------------


def _on(fake: FakeCuda, step: Step) -> list[Any]:
    return [fake.cuda(t) for t in (step.q, step.k, step.v, step.g, step.beta)]


def test_a_plan_of_segments_and_other_dtypes_are_refused() -> None:
    with FakeCuda(capability=(9, 0)) as fake, recorded_launches() as launches:
        step = make_step((70,), (1, 1))
        with pytest.raises(NotImplementedError, match="plan is 4; needs 'auto' or 'serial' on CUDA"):
            chunk_gated_delta_rule(*_on(fake, step), plan=4)
        with pytest.raises(ValueError, match=r"q is torch.float32; needs torch.bfloat16 on CUDA"):
            chunk_gated_delta_rule(*_on(fake, make_step((70,), (1, 1), dtype="float32")))
        wide = _on(fake, step)
        wide[3] = wide[3].double()
        with pytest.raises(ValueError, match=r"g is torch.float64"):
            chunk_gated_delta_rule(*wide)
        assert not launches


def test_a_hopper_device_runs_the_kernels_of_its_architecture() -> None:
    with FakeCuda(capability=(9, 0)) as fake, recorded_launches() as launches:
        chunk_gated_delta_rule(*_on(fake, make_step((70,), (1, 1))), use_qk_l2norm_in_kernel=True)
    assert [launch.library for launch in launches] == ["gdn_prep_sm_90a", "gdn_state_scan_sm_90a"]


@pytest.mark.usefixtures("cuda_autocast")
def test_autocast_casts_rows_of_fp32_in_the_graph(programs: dict[str, Program]) -> None:
    """The bits of a cast by hand, gradients in FP32; operands that are BF16, and gates, are what they were."""

    def emulate(launch: Launch) -> None:
        programs[launch.library.removesuffix("_sm_90a")].run(*launch.args)

    narrow = make_step((70, 5), (1, 2))
    assert narrow.do is not None
    wide = replace(narrow, **{name: getattr(narrow, name).float() for name in "qkv"})
    results = []
    with FakeCuda(capability=(9, 0)) as fake, recorded_launches(emulate) as launches:
        for step in (narrow, wide, replace(wide, q=narrow.q)):
            leaves = [t.requires_grad_() for t in _on(fake, step)]
            o, _ = chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=(0, 70, 75))
            assert o.dtype == torch.bfloat16
            grads = torch.autograd.grad(o, leaves, fake.cuda(narrow.do))
            assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
            results.append([t.detach().float() for t in (o, *grads)])
    assert len(launches) == 3 * 4
    for name, *values in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), *results, strict=True):
        for value in values[1:]:
            assert_same_bits(value, values[0], name)


@pytest.mark.usefixtures("cuda_autocast")
def test_autocast_casts_nothing_else() -> None:
    """Not on the CPU, not for the functional passes, not FP16 and not FP64."""
    step = make_step((70,), (1, 1), dtype="float32")
    assert step.differentiate()["o"].dtype == torch.float32
    with FakeCuda(capability=(9, 0)) as fake, recorded_launches() as launches:
        operands = _on(fake, step)
        q, k, v, g, beta = operands
        with pytest.raises(ValueError, match=r"q is torch.float32; needs torch.bfloat16 on CUDA"):
            chunk_gated_delta_rule_fwd(*operands)
        with pytest.raises(ValueError, match=r"q is torch.float32; needs torch.bfloat16 on CUDA"):
            chunk_gated_delta_rule_bwd(q, k, v, g, beta, v)
        for dtype in (torch.float16, torch.float64):
            with pytest.raises(ValueError, match=rf"v is {dtype}; needs torch.bfloat16"):
                chunk_gated_delta_rule(q, k, v.to(dtype), g, beta)
        torch.set_autocast_dtype("cuda", torch.float16)
        with pytest.raises(ValueError, match=r"q is torch.float32; needs torch.bfloat16 on CUDA"):
            chunk_gated_delta_rule(*operands)
        assert not launches
