"""Declaration, trainer arguments and what is served, without torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cake_core.testing.trainer import Trainer, assert_signatures, assert_torch_free
from cake_gdn import op

TRAINER = Trainer({"gdn": op.OP}, {"--linear-attention-backend": ("fla", "flashqla")})
DEST = "cake_gdn_recompute_state"


@pytest.fixture(autouse=True)
def only_gdn() -> Iterator[None]:
    with TRAINER.alone():
        yield


# --- declaration ------------------------------------------------------------------------------------------------


def test_the_declaration_is_that_of_the_spec() -> None:
    assert op.OP.name == "gdn"
    assert op.OP.variants == op.OP.trainer_variants == ("det", "fast")
    assert op.OP.selected_by == (("linear_attention_backend", "cake"),)
    assert op.OP.impl == "cake_gdn.api"
    assert [(flag.dest, flag.default, flag.kind, flag.hidden) for flag in op.OP.flags] == [
        (DEST, False, "switch", False)
    ]
    assert op.OP.flags[0].option() == "--cake-gdn-recompute-state"
    assert op.OP.prebuild_params == ()


def test_the_declaration_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="cake.ops", name="gdn")
    assert entry.load() is op.OP


def test_the_public_names_are_those_that_trainers_import() -> None:
    assert set(op.OP.entry_points) == {
        "RecomputeHandle",
        "build_context_kcp",
        "chunk_gated_delta_rule",
        "chunk_gated_delta_rule_bwd",
        "chunk_gated_delta_rule_fwd",
        "gated_delta_rule_reference",
        "packed_qkv_views",
        "partition_kcp",
    }
    import cake_gdn

    beside = {"GdnGrads", "GdnSaved", "check_supported", "is_supported"}
    queries = {"gdn_kcp_comm_bytes", "gdn_saved_bytes", "gdn_workspace_bytes"}
    assert set(cake_gdn.__all__) == {*op.OP.entry_points, *beside, *queries}
    for name in cake_gdn.__all__:
        assert getattr(cake_gdn, name) is not None, name


def test_signatures_are_those_of_the_spec() -> None:
    """The positional order up to cu_seqlens_cpu is fla-core's, whose chunk_indices the op makes itself."""
    import cake_gdn

    passes = (
        "use_qk_l2norm_in_kernel=False state_v_first=False cu_seqlens=None cu_seqlens_cpu=None cp_context=None "
        "plan='auto'"
    )
    wanted = {
        "chunk_gated_delta_rule": "q k v g beta scale=None initial_state=None output_final_state=False "
        "use_qk_l2norm_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False "
        "cu_seqlens=None cu_seqlens_cpu=None cp_context=None * use_gate_in_kernel=False A_log=None dt_bias=None "
        "plan='auto' recompute_state=None recompute_handle=None chunk_size=64 head_first=False "
        "transpose_state_layout=None",
        "chunk_gated_delta_rule_fwd": "q k v g beta scale=None initial_state=None * output_final_state=False "
        f"{passes} save='full'",
        "chunk_gated_delta_rule_bwd": "q k v g beta do dht=None * scale=None initial_state=None saved=None "
        f"{passes} needs=(True, True, True, True, True, True)",
        "packed_qkv_views": "qkv * num_qk_heads num_v_heads",
        "check_supported": "num_qk_heads num_v_heads head_dim_k=128 head_dim_v=128 * arch=None",
        "gdn_kcp_comm_bytes": "ctx num_v_heads",
    }
    wanted["is_supported"] = wanted["check_supported"]
    assert_signatures(cake_gdn, wanted, op.OP.entry_points)


def test_declaration_plan_and_queries_import_without_torch() -> None:
    """R1: a process without torch can import the package and its declaration, and ask what is served and what it
    costs."""
    assert_torch_free(
        "import cake_gdn, cake_gdn.op, cake_gdn.plan\n"
        "from cake_gdn import check_supported, gdn_saved_bytes, gdn_workspace_bytes, is_supported\n"
        "check_supported(16, 64); assert not is_supported(16, 40)\n"
        "assert gdn_saved_bytes(64, 1, 1, 1, save='light', use_qk_l2norm_in_kernel=False) == 64 * 64 * 2\n"
        "assert set(gdn_workspace_bytes(64, 1, 1, 1)) == {'E', 'dS', 'replay'}\n"
        "import cake_gdn.testing.shapes, cake_gdn.testing.budgets\n"
    )


# --- command line -----------------------------------------------------------------------------------------------


def test_the_selector_of_the_trainer_learns_the_backend() -> None:
    TRAINER.assert_selectable("gdn")


def test_variants() -> None:
    TRAINER.assert_variants("gdn")


def test_the_recomputation_of_states_is_a_switch() -> None:
    TRAINER.assert_switch("gdn", DEST)


# --- validate(args) ---------------------------------------------------------------------------------------------

QWEN = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tensor_model_parallel_size": 2,
    "fp16": False,
    "qkv_format": "thd",
    "context_parallel_size": 4,
}
# Each: the attributes that differ from QWEN, the flags that the message names, what else it shows.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "heads-of-a-rank": (
        {"linear_num_value_heads": 48, "tensor_model_parallel_size": 32},
        ("--linear-num-key-heads", "16", "32"),
    ),
    "value-heads-of-a-rank": (
        {"linear_num_key_heads": 16, "linear_num_value_heads": 24, "tensor_model_parallel_size": 16},
        ("--linear-num-value-heads", "24", "16"),
    ),
    "value-heads-that-key-heads-do-not-divide": (
        {"linear_num_value_heads": 40},
        ("--linear-num-key-heads", "--linear-num-value-heads", "16, 40", "2 tensor-parallel ranks"),
    ),
    "no-key-heads": ({"linear_num_key_heads": 0}, ("--linear-num-key-heads", "0")),
    "key-head-dim": ({"linear_key_head_dim": 256}, ("--linear-key-head-dim", "256", "128")),
    "value-head-dim": ({"linear_value_head_dim": 64}, ("--linear-value-head-dim", "64", "128")),
    "fp16": ({"fp16": True}, ("--fp16", "True")),
}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [(16, 64), (16, 48), (16, 32), (16, 16)])
def test_models_are_accepted_on_the_ranks_that_divide_their_heads(heads: tuple[int, int], ranks: int) -> None:
    sizes = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]}
    assert op.OP.validate is not None
    op.OP.validate(SimpleNamespace(**{**QWEN, **sizes, "tensor_model_parallel_size": ranks}))
    op.OP.validate(SimpleNamespace(**{**QWEN, **sizes, "tensor_model_parallel_size": ranks, "qkv_format": "bshd"}))


@pytest.mark.parametrize("name", REFUSED)
def test_trainer_settings_that_are_not_served_are_refused_by_flag_and_value(name: str) -> None:
    changed, shown = REFUSED[name]
    assert op.OP.validate is not None
    with pytest.raises(ValueError, match=r"^gdn: ") as caught:
        op.OP.validate(SimpleNamespace(**{**QWEN, **changed}))
    for text in shown:
        assert text in str(caught.value)


def test_what_a_trainer_does_not_have_is_skipped() -> None:
    assert op.OP.validate is not None
    op.OP.validate(SimpleNamespace())
    op.OP.validate(SimpleNamespace(**dict.fromkeys(QWEN)))
    for name in QWEN:
        op.OP.validate(SimpleNamespace(**{key: value for key, value in QWEN.items() if key != name}))


def test_miles_refuses_what_validate_refuses_only_when_the_backend_is_selected() -> None:
    TRAINER.assert_refused_when_selected("gdn", "256", linear_key_head_dim=256)


# --- check_supported --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads", [(16, 64), (16, 48), (16, 32), (16, 16), (2, 8), (4, 8), (8, 24), (1, 1), (64, 64), (1, 7)]
)
def test_served_layers(heads: tuple[int, int]) -> None:
    for arch in (None, "cpu", "sm_90a"):
        op.check_supported(*heads, arch=arch)
        assert op.is_supported(*heads, 128, 128, arch=arch)


# Arguments, and what the ValueError has to name.
UNSERVED = {
    "no-key-heads": ((0, 8), r"num_qk_heads is 0;"),
    "no-value-heads": ((8, 0), r"num_v_heads is 0;"),
    "negative-heads": ((-2, 8), r"num_qk_heads is -2;"),
    "value-heads-not-a-multiple": ((16, 40), r"num_v_heads is 40; .*16"),
    "fewer-value-heads": ((16, 8), r"num_v_heads is 8; .*16"),
    "key-dim": ((16, 32, 256), r"head_dim_k is 256; .*128"),
    "value-dim": ((16, 32, 128, 64), r"head_dim_v is 64; .*128"),
}


@pytest.mark.parametrize("name", UNSERVED)
@pytest.mark.parametrize("arch", [None, "cpu", "sm_90a"])
def test_unserved_layers_are_refused_by_argument_and_value(name: str, arch: str | None) -> None:
    args, text = UNSERVED[name]
    with pytest.raises(ValueError, match=f"check_supported: {text}"):
        op.check_supported(*args, arch=arch)
    assert not op.is_supported(*args, arch=arch)


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((True, 8), {}, "num_qk_heads"),
        (("16", 32), {}, "num_qk_heads"),
        ((16, 32.0), {}, "num_v_heads"),
        ((16, None), {}, "num_v_heads"),
        ((16, 32, True), {}, "head_dim_k"),
        ((16, 32, 128, "128"), {}, "head_dim_v"),
        ((16, 32), {"arch": 90}, "arch"),
        ((16, 32), {"variant": "det"}, "variant"),
    ],
)
def test_arguments_of_another_type_are_type_errors(args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        op.check_supported(*args, **kwargs)
    with pytest.raises(TypeError, match=named):
        op.is_supported(*args, **kwargs)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "gfx942"])
def test_architectures_without_kernels_are_not_implemented(arch: str) -> None:
    with pytest.raises(NotImplementedError, match=arch) as caught:
        op.check_supported(16, 32, arch=arch)
    assert "'cpu'" in str(caught.value)
    assert not op.is_supported(16, 32, arch=arch)
