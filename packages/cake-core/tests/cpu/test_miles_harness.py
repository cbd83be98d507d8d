"""Command line to training process, as the miles trainer does it, with a real second interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cake_core import hooks, registry
from cake_core.spec import Flag, OpSpec
from cake_core.testing import miles


def op(name: str, dest: str, **fields: Any) -> OpSpec:
    given = {"variants": ("det", "fast"), "impl": f"cake_{name}.api", "entry_points": ("run",)}
    return OpSpec(name=name, selected_by=((dest, "cake"),), **{**given, **fields})


ROWS = Flag("cake_gqa_rows", 64, "int", minimum=1, help="rows")
SPECS = {
    "gdn": op("gdn", "linear_attention_backend"),
    "gqa": op("gqa", "full_attention_backend", flags=(ROWS,)),
    "kda": op("kda", "kda_backend", cli_variants=("det",)),
}


@pytest.fixture
def three_ops() -> Iterator[None]:
    with registry.override(SPECS):
        yield


@pytest.mark.usefixtures("three_ops")
def test_the_resolved_variants_and_options_reach_a_spawned_process() -> None:
    """R17: written back by the driver, pickled, configured by the worker."""
    args = miles.parse_args(
        ["--full-attention-backend", "cake", "--cake-gqa-rows", "8", "--kda-backend", "cake", "--hidden-size", "64"]
    )
    report = miles.run_worker(args, specs=SPECS)
    assert {name: found["variant"] for name, found in report["ops"].items()} == {
        "gdn": "det",
        "gqa": "fast",
        "kda": "det",
    }
    assert report["ops"]["gqa"]["options"] == {"cake_gqa_rows": 8}
    assert [name for name, found in report["ops"].items() if found["variant_is_default"]] == ["gdn"]
    assert report["generation"] == 1


@pytest.mark.usefixtures("three_ops")
def test_the_closed_selector_of_miles_accepts_cake_before_the_parse_in_the_middle() -> None:
    """R24: miles parses while it adds its flags, so a later extension of the choices would come too late."""
    args = miles.parse_args(["--linear-attention-backend", "cake"])
    assert args.cake_gdn_variant == "fast"
    assert miles.parse_args([]).linear_attention_backend == "fla"
    with pytest.raises(SystemExit):
        miles.parse_args(["--linear-attention-backend", "cake"], hooks=False)


@pytest.mark.usefixtures("three_ops")
def test_deterministic_mode_is_det_for_every_selected_op_in_the_worker() -> None:
    """R17: and an explicit fast does not start."""
    argv = ["--linear-attention-backend", "cake", "--full-attention-backend", "cake", "--deterministic-mode"]
    args = miles.parse_args(argv)
    assert (args.cake_gdn_variant, args.cake_gqa_variant) == ("det", "det")
    report = miles.run_worker(args, specs=SPECS)
    assert report["deterministic_mode"] is True
    assert {found["variant"] for found in report["ops"].values()} == {"det"}
    with pytest.raises(ValueError, match="--cake-gdn-variant"):
        miles.parse_args([*argv, "--cake-gdn-variant", "fast"])


@pytest.mark.usefixtures("three_ops")
def test_a_file_of_defaults_configures_the_other_backend() -> None:
    """R11: values of a file meet the same checks; unknown keys are miles' own error."""
    file: dict[str, Any] = {"full_attention_backend": "cake", "cake_gqa_rows": 8, "cake_kda_variant": None}
    args = miles.parse_args(["--train-backend", "fsdp"], yaml=file)
    assert (args.cake_gqa_variant, args.cake_gqa_rows) == ("fast", 8)
    assert not hasattr(args, "num_attention_heads")
    for wrong in ({"cake_gqa_rows": 0}, {"cake_gqa_variant": "exact"}, {"cake_kda_variant": "fast"}):
        with pytest.raises(ValueError, match="--cake-"):
            miles.parse_args(["--train-backend", "fsdp"], yaml={**file, **wrong})
    with pytest.raises(ValueError, match="cake_gqa_row"):
        miles.parse_args(["--train-backend", "fsdp"], yaml={"cake_gqa_row": 8})


@pytest.mark.usefixtures("three_ops")
def test_an_unknown_backend_and_an_abbreviated_flag_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        miles.parse_args(["--linear-attention-backend", "cakes"])
    assert "invalid choice: 'cakes'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        miles.parse_args(["--linear-attention-backend", "cake", "--cake-gdn-var", "det"])


def test_the_check_of_an_op_sees_the_trainers_arguments() -> None:
    """R11: Megatron's dests, after Megatron filled in what it derives."""
    seen: list[Any] = []

    def per_rank_heads(args: Any) -> None:
        seen.append(args.kv_channels)
        if args.num_attention_heads % args.tensor_model_parallel_size:
            raise ValueError(f"--tensor-model-parallel-size is {args.tensor_model_parallel_size}")

    with registry.override({"gqa": op("gqa", "full_attention_backend", validate=per_rank_heads)}):
        argv = ["--full-attention-backend", "cake", "--num-attention-heads", "6", "--hidden-size", "384"]
        miles.parse_args(argv)
        assert seen == [64]
        with pytest.raises(ValueError, match="--tensor-model-parallel-size is 4"):
            miles.parse_args([*argv, "--tensor-model-parallel-size", "4"])


def test_a_trainer_without_the_hooks_is_served_by_the_init_path() -> None:
    """R17: a launcher adds the flags first; the process validates and configures at the end of Megatron's start."""

    with registry.override(SPECS):
        args = miles.parse_args(
            [
                "--full-attention-backend",
                "cake",
                "--custom-megatron-init-path",
                "cake_core.hooks.megatron_init",
            ],
            add_custom_arguments=hooks.add_custom_arguments,
            hooks=False,
        )
    assert args.cake_gqa_variant is None
    report = miles.run_worker(args, specs=SPECS, hooks=False)
    assert report["ops"]["gqa"]["variant"] == "fast"


def test_a_worker_takes_its_declarations_by_reference() -> None:
    """R17: the synthetic op, whose declaration holds functions, in a process that has to import it."""
    from cake_core.testing.synthetic_op import OP

    with registry.override({"synthetic": OP}):
        args = miles.parse_args(["--synthetic-backend", "cake", "--cake-synthetic-rows-per-chunk", "32"])
    report = miles.run_worker(args, specs={"synthetic": OP})
    assert report["ops"]["synthetic"]["variant"] == "fast"
    assert report["ops"]["synthetic"]["options"]["cake_synthetic_rows_per_chunk"] == 32


def test_a_worker_resolves_an_importable_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "declared_elsewhere.py").write_text(
        "from cake_core.spec import OpSpec\n"
        "OPS = {'x': OpSpec('x', ('fast',), (('x', 'cake'),), 'cake_x.api', ('run',), validate=lambda args: None)}\n"
        "def make(): return OPS\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for reference in ("declared_elsewhere:OPS", "declared_elsewhere:make"):
        report = miles.run_worker(miles.parse_args([]), specs=reference)
        assert report["ops"]["x"]["variant"] == "fast"


def test_a_worker_that_fails_reports_its_error() -> None:
    args = miles.parse_args([])
    args.cake_workspace_pool_bytes = -1
    with pytest.raises(RuntimeError, match="ValueError: configure: --cake-workspace-pool-bytes is -1"):
        miles.run_worker(args)


def test_every_installed_op_goes_from_the_command_line_to_the_worker() -> None:
    """R17: the installed declarations, found by the worker itself."""
    argv = ["--hidden-size", "4096", "--normalization", "RMSNorm", "--apply-layernorm-1p", "--bf16"]
    for name in registry.ops():
        dest, value = registry.op_spec(name).selected_by[0]
        argv += ["--" + dest.replace("_", "-"), str(value)]
    report = miles.run_worker(miles.parse_args(argv))
    assert set(report["ops"]) == set(registry.ops())
    for name, found in report["ops"].items():
        spec = registry.op_spec(name)
        assert found["variant"] == ("fast" if "fast" in spec.trainer_variants else "det")
