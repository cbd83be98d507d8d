"""How the miles trainer turns a command line into a configured training process, with argparse alone.

``parse_args`` is the driver: the bare pass that finds the backend, Megatron's or FSDP's parser, miles' own flags with
their closed selectors, the parse in the middle that looks for user functions, the validation, and the extension
hooks, found by their entry points as miles finds them. ``run_worker`` is a training process: the pickled arguments
cross into a spawned interpreter, which configures itself and reports.

miles parses in the middle of adding its flags, when its selectors exist. So the hooks add theirs right before that
parse: later, a selector's new value would already have been refused.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from .. import config, registry
from ..spec import OpSpec

__all__ = ["extensions", "parse_args", "run_worker"]

_GROUP = "miles.ext_kernels"
_Parser = argparse.ArgumentParser
_Custom = Callable[[_Parser], _Parser]

# Megatron's dests that ops read: option -> keyword arguments of add_argument.
_MEGATRON: Mapping[str, Mapping[str, Any]] = {
    "--num-attention-heads": {"type": int},
    "--num-query-groups": {"type": int, "default": 1},
    "--group-query-attention": {"action": "store_true"},
    "--kv-channels": {"type": int},
    "--hidden-size": {"type": int},
    "--tensor-model-parallel-size": {"type": int, "default": 1},
    "--context-parallel-size": {"type": int, "default": 1},
    "--sequence-parallel": {"action": "store_true"},
    "--deterministic-mode": {"action": "store_true"},
    "--experimental-attention-variant": {"type": str, "choices": ["gated_delta_net", "dsa"]},
    "--linear-conv-kernel-dim": {"type": int, "default": 4},
    "--linear-key-head-dim": {"type": int, "default": 128},
    "--linear-value-head-dim": {"type": int, "default": 128},
    "--linear-num-key-heads": {"type": int, "default": 16},
    "--linear-num-value-heads": {"type": int, "default": 32},
    "--dsa-indexer-n-heads": {"type": int},
    "--dsa-indexer-head-dim": {"type": int},
    "--dsa-indexer-topk": {"type": int},
    "--num-residual-streams": {"type": int, "default": 4},
    "--mhc-sinkhorn-iterations": {"type": int, "default": 20},
    "--kv-lora-rank": {"type": int, "default": 32},
    "--qk-head-dim": {"type": int, "default": 128},
    "--qk-pos-emb-head-dim": {"type": int, "default": 64},
    "--v-head-dim": {"type": int, "default": 128},
    "--normalization": {"type": str, "default": "LayerNorm", "choices": ["LayerNorm", "RMSNorm"]},
    "--apply-layernorm-1p": {"action": "store_true"},
    "--fp16": {"action": "store_true"},
    "--bf16": {"action": "store_true"},
}
_FSDP: Mapping[str, Mapping[str, Any]] = {
    "--deterministic-mode": {"action": "store_true"},
    "--context-parallel-size": {"type": int, "default": 1},
}
_MILES: Mapping[str, Mapping[str, Any]] = {
    "--train-backend": {"type": str, "choices": ["megatron", "fsdp"], "default": "megatron"},
    "--qkv-format": {"type": str, "choices": ["thd", "bshd"], "default": "thd"},
    "--linear-attention-backend": {"type": str, "choices": ["fla", "flashqla"], "default": "fla"},
    "--dsa-attention-backend": {"type": str, "choices": ["megatron", "tilelang"], "default": "megatron"},
    "--miles-dsa-topk-backend": {"type": str, "choices": ["torch", "flashinfer"], "default": "torch"},
    "--true-on-policy-mode": {"action": "store_true"},
    "--rollout-function-path": {"type": str},
    "--custom-megatron-init-path": {"type": str},
}


def parse_args(
    argv: Sequence[str],
    *,
    yaml: Mapping[str, Any] | None = None,
    add_custom_arguments: _Custom | None = None,
    hooks: bool = True,
    selectors: bool = True,
) -> argparse.Namespace:
    """The driver's validated arguments.

    Args:
        argv: the command line, without the program.
        yaml: contents of the file of defaults that the FSDP backend reads.
        add_custom_arguments: a launcher's callback; it runs before miles' own flags.
        hooks: False: a miles that does not know the extension hooks.
        selectors: let the hooks create the selectors that miles does not have.

    Raises: SystemExit for what argparse refuses; ValueError for an unknown key of ``yaml``; what the hooks raise.
    """

    def add_miles_arguments(parser: _Parser) -> _Parser:
        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser)
        _add(parser, _MILES)
        if hooks:
            for extension in extensions():
                # `selectors` stands for the flags that miles would grow together with the layers that read them.
                parser = extension.add_arguments(parser, selectors=selectors)
        parser.parse_known_args(argv)
        return parser

    bare, _ = add_miles_arguments(_Parser(prog="miles")).parse_known_args(argv)
    if bare.train_backend == "fsdp":
        args = _parse_fsdp(argv, yaml or {}, add_miles_arguments)
    else:
        args = _parse_megatron(argv, add_miles_arguments)
    if hooks:
        for extension in extensions():
            extension.validate_args(args)
    return args


def run_worker(args: Any, *, specs: Mapping[str, OpSpec] | str | None = None, hooks: bool = True) -> dict[str, Any]:
    """Ship ``args`` to a spawned training process, configure it and return its ``config.snapshot()``.

    Args:
        args: what ``parse_args`` returned, or any other picklable object with the same attributes.
        specs: registry of the worker, for declarations that are not installed: a mapping whose declarations pickle, or
            the importable reference "module:attribute" of a mapping or of a function without arguments that makes one.
            None: the installed ops.
        hooks: False: only ``--custom-megatron-init-path`` is called, as a miles without the hooks does.

    Raises: RuntimeError with the worker's error.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    worker = context.Process(target=_worker, args=(send, pickle.dumps(args), specs, hooks))
    worker.start()
    send.close()
    try:
        report: dict[str, Any] | str = receive.recv()
    except EOFError:
        report = "it ended without a report"
    finally:
        receive.close()
        worker.join()
    if isinstance(report, str):
        raise RuntimeError(f"the training process failed: {report}")
    return report


def extensions() -> Iterator[ModuleType]:
    """The modules of the group ``miles.ext_kernels``, in name order."""
    for entry in sorted(importlib.metadata.entry_points(group=_GROUP), key=lambda entry: entry.name):
        yield entry.load()


def _add(parser: _Parser, options: Mapping[str, Mapping[str, Any]]) -> None:
    for option, argument in options.items():
        parser.add_argument(option, **argument)


def _parse_megatron(argv: Sequence[str], add_miles_arguments: _Custom) -> argparse.Namespace:
    parser = _Parser(prog="miles", allow_abbrev=False)
    _add(parser, _MEGATRON)
    args = add_miles_arguments(parser).parse_args(argv)
    if args.kv_channels is None and args.num_attention_heads:
        args.kv_channels = (args.hidden_size or 0) // args.num_attention_heads
    return args


def _parse_fsdp(argv: Sequence[str], yaml: Mapping[str, Any], add_miles_arguments: _Custom) -> argparse.Namespace:
    parser = _Parser(prog="miles")
    _add(parser, _FSDP)
    parser = add_miles_arguments(parser)
    args = parser.parse_args(argv)
    if unknown := set(yaml) - set(vars(args)):
        raise ValueError(f"unknown keys in the file of defaults: {sorted(unknown)}")
    parser.set_defaults(**yaml)
    return parser.parse_args(argv)


def _worker(send: Connection, pickled: bytes, specs: Mapping[str, OpSpec] | str | None, hooks: bool) -> None:
    try:
        declarations: Any = _reference(specs) if isinstance(specs, str) else specs
        if callable(declarations):
            declarations = declarations()
        with nullcontext() if declarations is None else registry.override(declarations):
            args = pickle.loads(pickled)
            if path := getattr(args, "custom_megatron_init_path", None):
                module, _, name = path.rpartition(".")
                _reference(f"{module}:{name}")(args)
            if hooks:
                for extension in extensions():
                    extension.configure(args)
            send.send(config.snapshot())
    except Exception as error:
        send.send(f"{type(error).__name__}: {error}")


def _reference(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
