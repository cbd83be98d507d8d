"""What ops with the same range serve: architectures, weight dtypes, trainer arguments. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from .arch import PORTABLE_ARCH
from .errors import check_str, message

__all__ = [
    "NATIVE_ARCHES",
    "SERVED_DEVICES",
    "check_arch",
    "check_weight_dtype",
    "heads_per_rank",
    "native_arch",
    "one_of",
    "refuse_fp16",
    "trainer_option",
]

# Architectures with programs of their own; every other one from sm_80 on runs the portable entry.
NATIVE_ARCHES: Final = ("sm_80", "sm_90a", "sm_100a", "sm_103a")
SERVED_DEVICES: Final = "a CPU or a CUDA device of compute capability 8.0 or newer"

_CUDA_WEIGHTS: Final = ("bfloat16", "float32")
_CPU_WEIGHTS: Final = (*_CUDA_WEIGHTS, "float64")
_ARCH: Final = re.compile(r"sm_(\d{2,3})[af]?")


def native_arch(arch: str, *, entry: str) -> str:
    """The manifest entry that a device of ``arch`` runs; ``entry`` is who asks, for the message.

    Raises: NotImplementedError below sm_80 and for a name that is no architecture.
    """
    if arch in NATIVE_ARCHES:
        return arch
    match = _ARCH.fullmatch(arch)
    if match is None or int(match[1]) < 80:
        raise NotImplementedError(message(entry, "arch", repr(arch), SERVED_DEVICES))
    return PORTABLE_ARCH


def check_arch(arch: object, *, entry: str) -> None:
    """None, "cpu" or an architecture that ``native_arch`` serves.

    Raises: TypeError for another Python type; NotImplementedError for an architecture without kernels.
    """
    if arch is None:
        return
    name = check_str(arch, "arch", entry=entry)
    if name == "cpu":
        return
    try:
        native_arch(name, entry=entry)
    except NotImplementedError:
        known = ", ".join(NATIVE_ARCHES)
        raise NotImplementedError(
            message(entry, "arch", repr(name), f"'cpu' or an architecture from sm_80 on, such as {known}")
        ) from None


def check_weight_dtype(weight_dtype: object, arch: str | None, *, entry: str) -> None:
    """A dtype name that the weight may have; the CPU also takes float64.

    Raises: TypeError for another Python type; ValueError for a dtype that is not served.
    """
    check_str(weight_dtype, "weight_dtype", entry=entry, choices=_CPU_WEIGHTS if arch == "cpu" else _CUDA_WEIGHTS)


def refuse_fp16(op: str, args: Any) -> None:
    """Raises: ValueError when the trainer runs in FP16."""
    if getattr(args, "fp16", False):
        raise ValueError(message(op, "--fp16", True, "BF16 activations", "pass --bf16"))


def heads_per_rank(op: str, args: Any) -> tuple[int | None, int | None]:
    """Key and value heads of linear attention on one tensor-parallel rank; None for an absent argument.

    Raises: ValueError naming the flag when the ranks do not divide its heads.
    """
    ranks = getattr(args, "tensor_model_parallel_size", None) or 1
    found: list[int | None] = []
    for dest in ("linear_num_key_heads", "linear_num_value_heads"):
        count = getattr(args, dest, None)
        if count is not None and count % ranks:
            wanted = f"a multiple of --tensor-model-parallel-size {ranks}"
            raise ValueError(message(op, trainer_option(dest), count, wanted))
        found.append(None if count is None else count // ranks)
    return found[0], found[1]


def trainer_option(dest: str) -> str:
    """The command-line spelling of a trainer's attribute, ``--linear-num-key-heads``."""
    return "--" + dest.replace("_", "-")


def one_of(values: Iterable[object]) -> str:
    """``a, b or c`` for messages."""
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last
