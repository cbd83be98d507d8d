"""Declaration, trainer arguments and what is served, without torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cake_core.testing.trainer import Trainer, assert_signatures, assert_torch_free
from cake_gqa import op

TRAINER = Trainer({"gqa": op.OP}, {"--full-attention-backend": ("te", "flash")})
DEST = "cake_gqa_check_seqlens"


@pytest.fixture(autouse=True)
def only_gqa() -> Iterator[None]:
    with TRAINER.alone():
        yield


# --- declaration ------------------------------------------------------------------------------------------------


def test_the_declaration_is_what_trainers_expect() -> None:
    assert op.OP.name == "gqa"
    assert op.OP.variants == op.OP.trainer_variants == ("det", "fast")
    assert op.OP.selected_by == (("full_attention_backend", "cake"),)
    assert op.OP.impl == "cake_gqa.api"
    (flag,) = op.OP.flags
    assert (flag.dest, flag.default, flag.kind, flag.hidden) == (DEST, False, "switch", False)
    assert flag.option() == "--cake-gqa-check-seqlens"
    assert op.OP.prebuild_params == (), "one set of libraries serves every head layout, length and form"


def test_the_declaration_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="cake.ops", name="gqa")
    assert entry.load() is op.OP


def test_the_public_names_are_those_that_trainers_import() -> None:
    entries = {"varlen_gqa_attention", "varlen_gqa_attention_bwd", "varlen_gqa_attention_fwd"}
    assert set(op.OP.entry_points) == entries
    import cake_gqa

    assert set(cake_gqa.__all__) == entries | {"bwd_scratch_bytes", "check_supported", "is_supported"}
    for name in cake_gqa.__all__:
        assert getattr(cake_gqa, name) is not None, name


def test_signatures() -> None:
    import cake_gqa

    offsets = "cu_seqlens_q cu_seqlens_k"
    wanted = {
        "varlen_gqa_attention": f"q k v {offsets} * max_seqlen_k softmax_scale=None dkv_acc=None return_lse=False "
        "check_seqlens=None",
        "varlen_gqa_attention_fwd": f"q k v {offsets} * softmax_scale=None out=None lse=None max_seqlen_k=None "
        "check_seqlens=None",
        "varlen_gqa_attention_bwd": f"q k v out lse dout {offsets} * max_seqlen_k softmax_scale=None dq=None dk=None "
        "dv=None dkv_dtype=None dk_acc=None dv_acc=None row_map=None needs=(True, True) check_seqlens=None",
        "check_supported": "num_heads_q num_heads_kv head_dim=256 * arch=None",
        "bwd_scratch_bytes": "total_q total_k num_heads_q num_heads_kv num_segments * variant arch row_map=False",
    }
    wanted["is_supported"] = wanted["check_supported"]
    assert_signatures(cake_gqa, wanted, op.OP.entry_points)


def test_declaration_plan_and_queries_import_without_torch() -> None:
    """R1: a process without torch can import the package and its declaration, and ask what is served and what it
    costs."""
    assert_torch_free(
        "import cake_gqa, cake_gqa.op, cake_gqa.plan\n"
        "from cake_gqa import bwd_scratch_bytes, check_supported, is_supported\n"
        "check_supported(24, 4); assert not is_supported(7, 2)\n"
        "assert bwd_scratch_bytes(64, 64, 2, 1, 1, variant='det', arch='sm_90a') > 0\n"
    )


# --- command line -----------------------------------------------------------------------------------------------


def test_the_selector_of_the_trainer_learns_the_backend() -> None:
    TRAINER.assert_selectable("gqa")


def test_variants() -> None:
    TRAINER.assert_variants("gqa")


def test_the_check_of_offsets_is_a_switch() -> None:
    TRAINER.assert_switch("gqa", DEST)


# --- validate(args) ---------------------------------------------------------------------------------------------

QWEN = {
    "num_attention_heads": 24,
    "num_query_groups": 4,
    "group_query_attention": True,
    "kv_channels": 256,
    "hidden_size": 5120,
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 4,
    "attention_dropout": 0.0,
    "window_size": None,
    "sliding_window": None,
    "softmax_type": "vanilla",
    "attn_logit_softcapping": None,
    "apply_query_key_layer_scaling": False,
    "multi_latent_attention": False,
    "qkv_format": "thd",
    "fp16": False,
}
# Each: the attributes that differ from QWEN, and what the message shows.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "head-dim": ({"kv_channels": 128}, ("--kv-channels", "128", "256")),
    "head-dim-of-the-hidden-size": (
        {"kv_channels": None, "hidden_size": 3072},
        ("--hidden-size / --num-attention-heads", "128", "256"),
    ),
    "fractional-head-dim": ({"kv_channels": None, "hidden_size": 6145}, ("--hidden-size", "256.042")),
    "query-heads-of-a-rank": ({"tensor_model_parallel_size": 16}, ("--num-attention-heads", "24, 4", "16")),
    "key-heads-of-a-rank": (
        {"num_attention_heads": 24, "num_query_groups": 6, "tensor_model_parallel_size": 4},
        ("--num-query-groups", "24, 6", "--tensor-model-parallel-size 4"),
    ),
    "a-rank-with-parts-of-two-groups": (
        {"num_attention_heads": 24, "num_query_groups": 4, "tensor_model_parallel_size": 6},
        ("--num-query-groups", "24, 4", "--tensor-model-parallel-size 6"),
    ),
    "indivisible-heads-of-a-rank": (
        {"num_attention_heads": 28, "num_query_groups": 8, "tensor_model_parallel_size": 2},
        ("--num-attention-heads", "28, 8", "14/4 each"),
    ),
    "no-key-heads": ({"num_query_groups": 0}, ("--num-query-groups", "24, 0")),
    "no-heads-and-no-groups": ({"num_attention_heads": 0, "num_query_groups": None}, ("--num-attention-heads", "0, 0")),
    "no-heads": ({"num_attention_heads": 0, "num_query_groups": 1}, ("--num-attention-heads", "0, 1")),
    "dropout": ({"attention_dropout": 0.1}, ("--attention-dropout", "0.1")),
    "window": ({"window_size": (127, 0)}, ("--window-size", "(127, 0)")),
    "sliding-window": ({"sliding_window": 4096}, ("--sliding-window", "4096")),
    "sinks": ({"softmax_type": "learnable"}, ("--softmax-type", "'learnable'", "'vanilla'")),
    "softcapping": ({"attn_logit_softcapping": 30.0}, ("--attn-logit-softcapping", "30.0")),
    "layer-scaling": ({"apply_query_key_layer_scaling": True}, ("--apply-query-key-layer-scaling", "True")),
    "latent": ({"multi_latent_attention": True}, ("--multi-latent-attention", "True")),
    "format": ({"qkv_format": "bshd"}, ("--qkv-format", "'bshd'", "'thd'")),
    "fp16": ({"fp16": True}, ("--fp16", "True")),
}


def refuse(**changed: Any) -> str:
    assert op.OP.validate is not None
    with pytest.raises(ValueError, match=r"^gqa: .*; needs ") as caught:
        op.OP.validate(SimpleNamespace(**{**QWEN, **changed}))
    return str(caught.value)


def accept(**changed: Any) -> None:
    assert op.OP.validate is not None
    op.OP.validate(SimpleNamespace(**{**QWEN, **changed}))


@pytest.mark.parametrize("name", REFUSED)
def test_trainer_settings_that_are_not_served_are_refused_by_flag_and_value(name: str) -> None:
    changed, shown = REFUSED[name]
    text = refuse(**changed)
    for part in shown:
        assert part in text


@pytest.mark.parametrize(
    ("heads", "groups", "ranks"),
    [(16, 2, 1), (16, 2, 2), (16, 2, 4), (16, 2, 8), (24, 4, 2), (24, 4, 4), (24, 4, 8), (16, 4, 8), (8, 8, 8)],
)
def test_models_are_accepted_per_rank(heads: int, groups: int, ranks: int) -> None:
    """Fewer key heads than ranks are copied: 24 over 4 on 8 ranks are 3/1, an odd group; 8 over 8 are 1/1."""
    accept(num_attention_heads=heads, num_query_groups=groups, tensor_model_parallel_size=ranks)


def test_without_groups_every_query_head_has_its_key_head() -> None:
    """num_query_groups is 1 then, as far as the trainer's parser goes."""
    accept(num_attention_heads=6, num_query_groups=1, group_query_attention=False, tensor_model_parallel_size=3)
    accept(num_attention_heads=6, num_query_groups=None, tensor_model_parallel_size=3)


def test_the_head_dimension_may_follow_from_the_hidden_size() -> None:
    accept(kv_channels=None, hidden_size=24 * 256)
    accept(kv_channels=None, hidden_size=None)


def test_a_window_without_a_left_edge_is_none() -> None:
    accept(window_size=(-1, 0))
    accept(window_size=(-1, -1))
    refuse(window_size=(0, 0))


def test_what_a_trainer_does_not_have_is_skipped() -> None:
    assert op.OP.validate is not None
    op.OP.validate(SimpleNamespace())
    op.OP.validate(SimpleNamespace(**dict.fromkeys(QWEN)))
    for name in QWEN:
        kept = {key: value for key, value in QWEN.items() if key not in (name, "kv_channels", "hidden_size")}
        op.OP.validate(SimpleNamespace(**kept))


def test_miles_refuses_what_validate_refuses_only_when_the_backend_is_selected() -> None:
    TRAINER.assert_refused_when_selected("gqa", "kv-channels", kv_channels=128)


# --- check_supported --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads",
    [(16, 2), (8, 1), (24, 4), (12, 2), (6, 1), (2, 1), (16, 4), (16, 8), (32, 16), (3, 1), (1, 1), (64, 64)],
)
def test_served_layers(heads: tuple[int, int]) -> None:
    for arch in (None, "cpu", "sm_90a"):
        op.check_supported(*heads, arch=arch)
        assert op.is_supported(*heads, 256, arch=arch)


# Arguments, and what the ValueError has to name.
UNSERVED = {
    "no-query-heads": ((0, 1), r"num_heads_q is 0;"),
    "no-key-heads": ((8, 0), r"num_heads_kv is 0;"),
    "negative-heads": ((-2, 1), r"num_heads_q is -2;"),
    "indivisible-heads": ((7, 2), r"num_heads_q is 7; .*2 of num_heads_kv"),
    "fewer-query-heads": ((4, 8), r"num_heads_q is 4; .*8"),
    "head-dim": ((16, 2, 128), r"head_dim is 128; .*256"),
    "wide-head-dim": ((16, 2, 512), r"head_dim is 512; .*256"),
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
        ((True, 8), {}, "num_heads_q"),
        (("16", 2), {}, "num_heads_q"),
        ((16, 2.0), {}, "num_heads_kv"),
        ((16, None), {}, "num_heads_kv"),
        ((16, 2, True), {}, "head_dim"),
        ((16, 2, "256"), {}, "head_dim"),
        ((16, 2), {"arch": 90}, "arch"),
        ((16, 2), {"variant": "det"}, "variant"),
    ],
)
def test_arguments_of_another_type_are_type_errors(args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        op.check_supported(*args, **kwargs)
    with pytest.raises(TypeError, match=named):
        op.is_supported(*args, **kwargs)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120", "gfx942"])
def test_architectures_without_kernels_are_not_implemented(arch: str) -> None:
    with pytest.raises(NotImplementedError, match=arch) as caught:
        op.check_supported(16, 2, arch=arch)
    assert "'cpu'" in str(caught.value)
    assert not op.is_supported(16, 2, arch=arch)
