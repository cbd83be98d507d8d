"""Every row of the error table: the kind, the argument, what it got; nothing is computed before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cake_core import config
from cake_core.kcp import LocalExchange, build_context_kcp, partition_kcp
from cake_core.testing.fake_cuda import FakeCuda
from cake_core.testing.launches import recorded_launches
from cake_gdn import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    gated_delta_rule_reference,
    gdn_kcp_comm_bytes,
    gdn_saved_bytes,
    gdn_workspace_bytes,
    packed_qkv_views,
)
from cake_gdn.testing import steps

STEP = steps.make_step((2, 4), (1, 2), state=True)
Q, K, V, G, BETA, DO = STEP.q, STEP.k, STEP.v, STEP.g, STEP.beta, STEP.do
CU, STATE, DHT = STEP.cu, STEP.state, STEP.dht
assert DO is not None
assert CU is not None
assert STATE is not None
assert DHT is not None
META = torch.device("meta")
ONE_RANK = build_context_kcp(partition_kcp((0, 2, 6), 1), None, 0, "cpu")
Call = Callable[[], object]


def case(name: str, kind: type[Exception], named: str, call: Call) -> Any:
    return pytest.param(kind, named, call, id=name)


def op(**given: Any) -> Call:
    """The autograd entry point on good operands with some replaced; None leaves an optional one out."""
    operands = {"q": Q, "k": K, "v": V, "g": G, "beta": BETA, "cu_seqlens": CU, "initial_state": STATE, **given}
    return lambda: chunk_gated_delta_rule(**operands)


def fwd(**given: Any) -> Call:
    operands = {"q": Q, "k": K, "v": V, "g": G, "beta": BETA, "cu_seqlens": CU, **given}
    return lambda: chunk_gated_delta_rule_fwd(**operands)


def bwd(**given: Any) -> Call:
    operands = {"q": Q, "k": K, "v": V, "g": G, "beta": BETA, "do": DO, "cu_seqlens": CU, "initial_state": STATE}
    return lambda: chunk_gated_delta_rule_bwd(**{**operands, **given})


def host(offsets: Any, **given: Any) -> Call:
    return op(cu_seqlens_cpu=offsets, **given)


def kcp(context: Any, **given: Any) -> Call:
    return op(cp_context=context, cu_seqlens=None, initial_state=None, **given)


def absent(value: Any = None) -> Any:
    """A value of a wrong type, which no type checker looks into."""
    return value


def wider(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t], -1)


CASES = [
    # Python types.
    case("q-list", TypeError, r": q is list", op(q=[1.0])),
    case("q-none", TypeError, r": q is NoneType", op(q=None)),
    case("k-list", TypeError, r": k is list", op(k=[1.0])),
    case("v-float", TypeError, r": v is float", op(v=1.0)),
    case("g-none", TypeError, r": g is NoneType", op(g=None)),
    case("beta-float", TypeError, r": beta is float", op(beta=0.5)),
    case("state-list", TypeError, r": initial_state is list", op(initial_state=[])),
    case("do-list", TypeError, r": do is list", bwd(do=[1.0])),
    case("dht-list", TypeError, r": dht is list", bwd(dht=[1.0])),
    case("cu-list", TypeError, r": cu_seqlens is list", op(cu_seqlens=[0, 2, 6])),
    case("host-int", TypeError, r": cu_seqlens_cpu is", host(6)),
    case("host-floats", TypeError, r": cu_seqlens_cpu", host([0.0, 2.0, 6.0])),
    case("scale-string", TypeError, r": scale is", op(scale="1")),
    case("scale-bool", TypeError, r": scale is", op(scale=True)),
    case("scale-tensor", TypeError, r": scale is", op(scale=torch.ones(()))),
    case("final-int", TypeError, r": output_final_state is", op(output_final_state=1)),
    case("norm-none", TypeError, r": use_qk_l2norm_in_kernel is", op(use_qk_l2norm_in_kernel=None)),
    case("v-first-int", TypeError, r": state_v_first is", op(state_v_first=0)),
    case("sigmoid-int", TypeError, r": use_beta_sigmoid_in_kernel is", op(use_beta_sigmoid_in_kernel=1)),
    case("gate-int", TypeError, r": use_gate_in_kernel is", op(use_gate_in_kernel=1)),
    case("recompute-int", TypeError, r": recompute_state is", op(recompute_state=1)),
    case("plan-float", TypeError, r": plan is", op(plan=2.0)),
    case("plan-bool", TypeError, r": plan is", op(plan=True)),
    case("plan-none", TypeError, r": plan is", op(plan=None)),
    case("save-none", TypeError, r": save is", fwd(save=None)),
    case("needs-string", TypeError, r": needs is", bwd(needs="qkvgbs")),
    case("needs-ints", TypeError, r": needs is", bwd(needs=(1,) * 6)),
    case("saved-dict", TypeError, r": saved is dict", bwd(saved={})),
    case("context-string", TypeError, r": cp_context", kcp("zigzag")),
    case("context-object", TypeError, r"cp_context|ctx", kcp(object())),
    case("handle-list", TypeError, r": recompute_handle", kcp(ONE_RANK, recompute_handle=[])),
    case("keyword", TypeError, r"variant", op(variant="det")),
    case("unknown-keyword", TypeError, r"chunk_indices", op(chunk_indices=None)),
    # Values of host arguments.
    case("chunk-size", ValueError, r": chunk_size is 32; needs 64", op(chunk_size=32)),
    case("head-first", ValueError, r": head_first is True", op(head_first=True)),
    case("transposed", ValueError, r"layout is True.*state_v_first=True", op(transpose_state_layout=True)),
    case("untransposed", ValueError, r": transpose_state_layout is False.*state_v_first=False",
         op(transpose_state_layout=False)),
    case("plan-odd", ValueError, r": plan is 3", op(plan=3)),
    case("plan-zero", ValueError, r": plan is 0", op(plan=0)),
    case("plan-large", ValueError, r": plan is 130", op(plan=130)),
    case("plan-negative", ValueError, r": plan is -2", op(plan=-2)),
    case("plan-string", ValueError, r": plan is 'parallel'", op(plan="parallel")),
    case("save-string", ValueError, r": save is 'all'", fwd(save="all")),
    case("needs-five", ValueError, r": needs is", bwd(needs=(True,) * 5)),
    case("neg-eigval-alone", ValueError, r": allow_neg_eigval is True.*use_beta_sigmoid_in_kernel",
         op(allow_neg_eigval=True)),
    case("gate-without-A", ValueError, r": A_log is None", op(use_gate_in_kernel=True)),
    case("A-without-gate", ValueError, r": A_log is", op(A_log=torch.ones(2))),
    case("bias-without-gate", ValueError, r": dt_bias is", op(dt_bias=torch.ones(2))),
    # Devices.
    case("k-device", ValueError, r": k is on meta", op(k=K.to(META))),
    case("v-device", ValueError, r": v is on meta", op(v=V.to(META))),
    case("g-device", ValueError, r": g is on meta", op(g=G.to(META))),
    case("beta-device", ValueError, r": beta is on meta", op(beta=BETA.to(META))),
    case("state-device", ValueError, r": initial_state is on meta", op(initial_state=STATE.to(META))),
    case("cu-device", ValueError, r": cu_seqlens is on meta", op(cu_seqlens=CU.to(META))),
    case("do-device", ValueError, r": do is on meta", bwd(do=DO.to(META))),
    # Dtypes.
    case("k-dtype", ValueError, r": k is torch.float32", op(k=K.float())),
    case("v-dtype", ValueError, r": v is torch.float32", op(v=V.float())),
    case("q-int", ValueError, r": q is torch.int64", op(q=Q.long(), k=K.long(), v=V.long())),
    case("q-complex", ValueError, r": q is torch.complex64", op(q=Q.cfloat(), k=K.cfloat(), v=V.cfloat())),
    case("g-int", ValueError, r": g is torch.int32", op(g=G.int())),
    case("beta-bool", ValueError, r": beta is torch.bool", op(beta=BETA.bool())),
    case("state-int", ValueError, r": initial_state is torch.int64", op(initial_state=STATE.long())),
    case("do-int", ValueError, r": do is torch.int64", bwd(do=DO.long())),
    case("dht-int", ValueError, r": dht is torch.int64", bwd(dht=DHT.long())),
    case("cu-float", ValueError, r": cu_seqlens is torch.float32", op(cu_seqlens=CU.float())),
    case("cu-int16", ValueError, r": cu_seqlens is torch.int16", op(cu_seqlens=CU.short())),
    # Ranks, shapes and sizes.
    case("q-3d", ValueError, r": q is .*\(6, 1, 128\)", op(q=Q[0])),
    case("q-head-dim", ValueError, r": q is .*256.*128", op(q=wider(Q), k=wider(K))),
    case("v-head-dim", ValueError, r": v is .*256.*128", op(v=wider(V))),
    case("q-narrow", ValueError, r": q is .*64.*128", op(q=Q[..., :64], k=K[..., :64])),
    case("k-shape", ValueError, r": k is .*\(1, 5, 1, 128\)", op(k=K[:, :5])),
    case("k-heads", ValueError, r": k is .*\(1, 6, 2, 128\)", op(k=K.repeat(1, 1, 2, 1))),
    case("v-tokens", ValueError, r": v is .*\(1, 5, 2, 128\)", op(v=V[:, :5])),
    case("v-heads", ValueError, r"\b3\b.*\b2\b|\b2\b.*\b3\b",
         op(q=Q.repeat(1, 1, 2, 1), k=K.repeat(1, 1, 2, 1), v=V[:, :, :1].repeat(1, 1, 3, 1))),
    case("no-value-heads", ValueError, r": v is", op(v=V[:, :, :0])),
    case("no-heads", ValueError, r": q is", op(q=Q[:, :, :0], k=K[:, :, :0])),
    case("fewer-value-heads", ValueError, r"\b1\b.*\b2\b|\b2\b.*\b1\b",
         op(q=Q.repeat(1, 1, 2, 1), k=K.repeat(1, 1, 2, 1), v=V[:, :, :1], g=G[..., :1], beta=BETA[..., :1])),
    case("g-shape", ValueError, r": g is .*\(1, 6, 1\)", op(g=G[..., :1])),
    case("g-of-channels", ValueError, r": g is .*\(1, 6, 2, 128\)", op(g=V.float())),
    case("beta-shape", ValueError, r": beta is .*\(1, 6, 1\)", op(beta=BETA[..., :1])),
    case("beta-head-first", ValueError, r": beta is .*\(1, 2, 6\)", op(beta=BETA.mT)),
    case("state-documents", ValueError, r": initial_state is .*\(1, 2, 128, 128\).*\(2, 2, 128, 128\)",
         op(initial_state=STATE[:1])),
    case("state-heads", ValueError, r": initial_state is .*\(2, 1, 128, 128\)", op(initial_state=STATE[:, :1])),
    case("state-width", ValueError, r": initial_state is", op(initial_state=STATE[..., :64])),
    case("do-shape", ValueError, r": do is .*\(1, 5, 2, 128\)", bwd(do=DO[:, :5])),
    case("dht-shape", ValueError, r": dht is .*\(1, 2, 128, 128\)", bwd(dht=DHT[:1])),
    case("A-shape", ValueError, r": A_log is .*\(3,\)", op(use_gate_in_kernel=True, A_log=torch.ones(3))),
    case("bias-shape", ValueError, r": dt_bias is .*\(1,\)",
         op(use_gate_in_kernel=True, A_log=torch.ones(2), dt_bias=torch.ones(1))),
    # Offsets.
    case("cu-with-a-batch", ValueError, r": cu_seqlens is given with q of batch size 2; needs .*1",
         op(**{name: t.reshape(2, 3, *t.shape[2:])
               for name, t in {"q": Q, "k": K, "v": V, "g": G, "beta": BETA}.items()})),
    case("cu-2d", ValueError, r": cu_seqlens is .*\(1, 3\)", op(cu_seqlens=CU[None])),
    case("cu-one", ValueError, r": cu_seqlens is", op(cu_seqlens=CU[:1], initial_state=None)),
    case("host-one", ValueError, r": cu_seqlens_cpu", host([0], cu_seqlens=None, initial_state=None)),
    case("host-not-from-zero", ValueError, r": cu_seqlens_cpu.*\b1\b", host([1, 2, 6])),
    case("host-decreasing", ValueError, r": cu_seqlens_cpu", host([0, 4, 2], cu_seqlens=None)),
    case("host-above", ValueError, r": cu_seqlens_cpu.*\b7\b.*\b6\b", host([0, 2, 7])),
    case("host-count", ValueError, r": cu_seqlens_cpu", host([0, 6])),
    case("host-meta", ValueError, r": cu_seqlens_cpu", host(CU.to(META))),
    # Under a context.
    case("context-state", ValueError, r": initial_state",
         op(cp_context=ONE_RANK, cu_seqlens=None, initial_state=STATE)),
    case("context-final", ValueError, r": output_final_state is True", kcp(ONE_RANK, output_final_state=True)),
    case("context-offsets", ValueError, r": cu_seqlens is \[0, 3, 6\].*\[0, 2, 6\]",
         op(cp_context=ONE_RANK, initial_state=None, cu_seqlens=torch.tensor([0, 3, 6]))),
    case("context-tokens", ValueError, r": q is .*\b5\b.*\b6\b",
         kcp(ONE_RANK, q=Q[:, :5], k=K[:, :5], v=V[:, :5], g=G[:, :5], beta=BETA[:, :5])),
    case("context-batch", ValueError, r": q is",
         kcp(ONE_RANK, **{name: t.reshape(2, 3, *t.shape[2:])
                          for name, t in {"q": Q, "k": K, "v": V, "g": G, "beta": BETA}.items()})),
    case("context-fwd-state", ValueError, r": initial_state",
         fwd(cp_context=ONE_RANK, cu_seqlens=None, initial_state=STATE)),
    case("context-bwd-dht", ValueError, r": dht",
         bwd(cp_context=ONE_RANK, cu_seqlens=None, initial_state=None, dht=DHT)),
    # Packed rows.
    case("views-int", ValueError, r"packed_qkv_views: qkv is torch.int64",
         lambda: packed_qkv_views(torch.zeros(1, 2, 512, dtype=torch.int64), num_qk_heads=1, num_v_heads=2)),
    case("views-complex", ValueError, r"packed_qkv_views: qkv is torch.complex64",
         lambda: packed_qkv_views(torch.zeros(1, 2, 512, dtype=torch.complex64), num_qk_heads=1, num_v_heads=2)),
    case("views-list", TypeError, r"packed_qkv_views: qkv is list",
         lambda: packed_qkv_views([], num_qk_heads=1, num_v_heads=2)),
    case("views-channels", ValueError, r"packed_qkv_views: qkv is .*511.*512",
         lambda: packed_qkv_views(torch.ones(1, 3, 511), num_qk_heads=1, num_v_heads=2)),
    case("views-heads", ValueError, r"packed_qkv_views: num_v_heads is 3",
         lambda: packed_qkv_views(torch.ones(1, 3, 7 * 128), num_qk_heads=2, num_v_heads=3)),
    case("views-bool", TypeError, r"packed_qkv_views: num_qk_heads is",
         lambda: packed_qkv_views(torch.ones(1, 3, 512), num_qk_heads=True, num_v_heads=2)),
    # Bytes.
    case("bytes-save", ValueError, r"gdn_saved_bytes: save is 'all'",
         lambda: gdn_saved_bytes(6, 2, 1, 2, save="all", use_qk_l2norm_in_kernel=True)),
    case("bytes-negative", ValueError, r"gdn_saved_bytes: T is -1",
         lambda: gdn_saved_bytes(-1, 2, 1, 2, save="full", use_qk_l2norm_in_kernel=True)),
    case("bytes-float", TypeError, r"gdn_workspace_bytes: T is",
         lambda: gdn_workspace_bytes(6.0, 2, 1, 2)),
    case("bytes-heads", ValueError, r"gdn_saved_bytes: num_v_heads is 3",
         lambda: gdn_saved_bytes(6, 2, 2, 3, save="full", use_qk_l2norm_in_kernel=True)),
    case("bytes-tapes", TypeError, r"gdn_workspace_bytes: tape_dtype is",
         lambda: gdn_workspace_bytes(6, 2, 1, 2, tape_dtype=torch.float32)),
    case("bytes-save-none", TypeError, r"gdn_saved_bytes: save is None",
         lambda: gdn_saved_bytes(6, 2, 1, 2, save=absent(), use_qk_l2norm_in_kernel=True)),
    case("bytes-norm", TypeError, r"gdn_saved_bytes: use_qk_l2norm_in_kernel is 1",
         lambda: gdn_saved_bytes(6, 2, 1, 2, save="full", use_qk_l2norm_in_kernel=1)),
    case("bytes-tape-list", TypeError, r"gdn_saved_bytes: tape_dtype is \[\]",
         lambda: gdn_saved_bytes(6, 2, 1, 2, save="full", use_qk_l2norm_in_kernel=True, tape_dtype=absent([]))),
    case("bytes-context", TypeError, r"gdn_saved_bytes: cp_context is str",
         lambda: gdn_saved_bytes(6, 2, 1, 2, save="full", use_qk_l2norm_in_kernel=True, cp_context="zigzag")),
    case("workspace-tape-list", TypeError, r"gdn_workspace_bytes: tape_dtype is \[\]",
         lambda: gdn_workspace_bytes(6, 2, 1, 2, tape_dtype=absent([]))),
    case("comm-context", TypeError, r"gdn_kcp_comm_bytes: ctx is NoneType", lambda: gdn_kcp_comm_bytes(None, 2)),
    case("reference-decreasing", ValueError, r"gated_delta_rule_reference: cu_seqlens\[2\] is 2",
         lambda: gated_delta_rule_reference(Q, K, V, G, BETA, cu_seqlens=[0, 4, 2, 6])),
    case("reference-above", ValueError, r"gated_delta_rule_reference: cu_seqlens\[1\] is 7",
         lambda: gated_delta_rule_reference(Q, K, V, G, BETA, cu_seqlens=torch.tensor([0, 7]))),
    case("reference-floats", TypeError, r"gated_delta_rule_reference: cu_seqlens\[1\] is 2.5",
         lambda: gated_delta_rule_reference(Q, K, V, G, BETA, cu_seqlens=absent([0, 2.5, 6]))),
    case("reference-batch", ValueError, r"gated_delta_rule_reference: cu_seqlens is given with q of batch size 2",
         lambda: gated_delta_rule_reference(*(x.repeat(2, *[1] * (x.dim() - 1)) for x in (Q, K, V, G, BETA)),
                                            cu_seqlens=[0, 6])),
    case("comm-heads", ValueError, r"gdn_kcp_comm_bytes: num_v_heads is 0", lambda: gdn_kcp_comm_bytes(ONE_RANK, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "named", "call"), CASES)
def test_bad_input_names_its_argument(kind: type[Exception], named: str, call: Call) -> None:
    with pytest.raises(kind, match=named) as caught:
        call()
    if "keyword" not in str(caught.value):
        assert "needs" in str(caught.value), "the message says what the argument needs"


def test_the_message_names_the_function_that_the_user_called() -> None:
    for name, call in (
        ("chunk_gated_delta_rule", op(g=G[..., :1])),
        ("chunk_gated_delta_rule_fwd", fwd(g=G[..., :1])),
        ("chunk_gated_delta_rule_bwd", bwd(g=G[..., :1])),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: g is .*; needs "):
            call()


def test_good_operands_are_taken() -> None:
    """What the cases change is what is refused."""
    for call in (op(), fwd(), bwd(), host([0, 2, 6]), kcp(ONE_RANK), op(chunk_size=64, head_first=False), op(plan=2)):
        call()


def test_a_context_of_another_device_is_refused() -> None:
    context = SimpleNamespace(
        **{name: getattr(ONE_RANK, name, None) for name in type(ONE_RANK).__slots__ if not name.startswith("_")}
    )
    context.device = torch.device("cuda", 0)
    context.wait_ready = lambda: None
    with pytest.raises(ValueError, match=r"chunk_gated_delta_rule: .*cuda"):
        kcp(context)()


def test_an_error_comes_before_any_collective() -> None:
    """A rank that refuses its operands must not leave the others in an exchange that it joined half."""
    local = LocalExchange(2, timeout=5.0)
    part = partition_kcp((0, 12), 2)
    contexts = [build_context_kcp(part, local.rank(r), r, "cpu") for r in range(2)]
    with pytest.raises(ValueError, match="output_final_state"):
        local.run(lambda r: kcp(contexts[r], output_final_state=True)())
    with pytest.raises(ValueError, match="plan"):
        local.run(lambda r: kcp(contexts[r], plan=7)())
    assert not local.calls


def test_a_device_without_a_backend_is_not_implemented() -> None:
    """Names the device and what serves; nothing is launched."""
    with FakeCuda(capability=(7, 5)) as fake, recorded_launches() as launches:
        q, k, v, g, beta = (fake.cuda(t) for t in (Q, K, V, G, BETA))
        for call in (chunk_gated_delta_rule, chunk_gated_delta_rule_fwd):
            with pytest.raises(
                NotImplementedError, match=r": device cuda:0 is of compute capability 7.5; needs .*sm_90a"
            ):
                call(q, k, v, g, beta)
        with pytest.raises(NotImplementedError, match=r": device cuda:0 is of compute capability 7.5; needs .*sm_90a"):
            chunk_gated_delta_rule_bwd(q, k, v, g, beta, v)
        assert not launches


def test_an_operand_without_strides_is_refused() -> None:
    for name in ("q", "v", "g"):
        with pytest.raises(ValueError, match=rf": {name} is of layout torch\.sparse_coo; needs torch.strided"):
            op(**{name: {"q": Q, "v": V, "g": G}[name].to_sparse()})()


def test_a_refused_configuration_stays_out() -> None:
    """deterministic mode rejects an explicit fast; the configuration before it stays."""
    config.configure(cake_gdn_variant="fast")
    with pytest.raises(ValueError, match="gdn"):
        config.configure(cake_gdn_variant="fast", deterministic_mode=True)
    with pytest.raises(ValueError, match="fastest"):
        config.configure(cake_gdn_variant="fastest")
    assert config.variant("gdn") == "fast"


def test_offsets_that_contradict_each_other_are_refused() -> None:
    """On the CPU both are read for free: decreasing ones, and a host copy of other offsets."""
    for broken, named in (
        ([0, 5, 2, 6], r"cu_seqlens\[2\] is 2"),
        ([0, 2, 4, 6], r"cu_seqlens_cpu\[2\] is 5; needs 4"),
    ):
        with pytest.raises(ValueError, match=named):
            op(cu_seqlens=torch.tensor(broken), cu_seqlens_cpu=[0, 2, 5, 6], initial_state=None)()


def test_a_handle_without_a_context_is_not_used() -> None:
    """A trainer passes one whatever the number of ranks is."""
    handle = SimpleNamespace(entries={})
    op(recompute_handle=handle)()
    assert not handle.entries
