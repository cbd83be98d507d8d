"""Largest relative RMS error of each output against the FP64 definition on the same operands. Torch-free.

``BUDGETS`` are for BF16 operands on any device, and for the gradients for the stored output
(``oracle.reference(stored=...)``). Any budget refuses a scale error of two per cent.

A backward has D = dout . out of the stored output, whose rounding is as large as all that is left of dP - D where few
keys are seen or one key has nearly all the weight. Against the definition dq and dk then have a budget of
``CANCELLING``; with scores of about one and packs of documents of 500 tokens and more ``BUDGETS`` hold there too. In a
single document of two heads its first rows weigh more: 2.64e-3 of dk and 2.05e-3 of dk_fp32 were seen.
"""

from __future__ import annotations

from collections.abc import Mapping

from cake_core.testing.case import Budget

__all__ = ["BUDGETS", "CANCELLING", "CPU", "FEW", "budgets_of", "cpu_budgets"]

_MEASURED = (
    "H200, CUDA 13.0, det, against the stored output; worst of three seeds of documents of 512 to 2049 tokens, windows "
    "of 2049 to 260000 keys, groups 1 to 8, uneven channels; of the gradients also short documents and q of 2 to 30, "
    "2026-12-01"
)
_EMULATED = (
    "against the definition, worst of three seeds: emulation.emulate on a CPU, groups 1 to 8, 2026-11-30, and an H200, "
    "2026-12-01"
)

BUDGETS = {
    "out": Budget(2.4e-3, 2.35e-3, _MEASURED),
    "lse": Budget(1.0e-7, 5.1e-8, _MEASURED),
    "dq": Budget(2.6e-3, 2.48e-3, _MEASURED),
    "dk": Budget(2.6e-3, 2.42e-3, _MEASURED),
    "dv": Budget(2.5e-3, 2.36e-3, _MEASURED),
    "dk_fp32": Budget(2.0e-3, 1.80e-3, _MEASURED),
    "dv_fp32": Budget(1.8e-3, 1.68e-3, _MEASURED),
}
"""``lse`` is of the rows that see a key. "dk_fp32" is dk of the forms that keep FP32, window and add. Over long windows
the error of ``out`` goes to 2.35e-3: two roundings to BF16 of 1.66e-3, the weights' and the output's own."""

CANCELLING = {
    "some": Budget(
        4.0e-3, 3.42e-3,
        _EMULATED + "; documents of 8 to 300 tokens, q of standard deviation 4 or q and k of uneven channels",
    ),
    "much": Budget(
        8.0e-3, 6.93e-3,
        _EMULATED + "; documents of 2 and 3 tokens, 130 queries of 3 keys, q of standard deviation 30, a scale of 1",
    ),
}  # fmt: skip
"""Of dq and dk, in every form."""

FEW = Budget(5e-7, 2.45e-7, "H200; q of standard deviation 2 to 30, a scale of 1, segments of 1 to 3 keys, 2026-12-01")
"""Of lse where few keys have the weight of a row: it is then as large as its scores, and tensor cores cut off what FP32
additions round. A standard deviation of 2 gives 1.13e-7, 4 gives 1.99e-7."""

_CPU = (
    "CPU backend against oracle.reference(stored=out), x86-64, torch 2.13, one thread; two seeds, documents of 1 to "
    "2049 tokens, windows of 4096 keys, groups 1 to 8, plain and FP32 forms, 2026-11-30"
)

CPU = {
    "float64": Budget(1e-12, 2.4e-14, _CPU),
    "float32": Budget(3e-6, 1.4e-6, _CPU),
    "bfloat16": Budget(1.8e-3, 1.72e-3, _CPU),
    "peaked float32": Budget(2e-5, 9.9e-6, _CPU + "; q of standard deviation 30, a softmax scale of 1"),
}
"""Of every output of the CPU backend by its dtype, gradients being those for the stored output: sums are FP32, or FP64
for FP64 operands, and rounded once. A score of 100 has an error of 100 * 2^-24 in FP32, and so has its exponential."""


def budgets_of(cancels: str = "", *, few: bool = False) -> Mapping[str, float]:
    """Output -> relative RMS.

    Args:
        cancels: how much of dP - D does, a key of ``CANCELLING`` or "".
        few: whether few keys have the weight of most rows.
    """
    found = {name: budget.rel_rms for name, budget in BUDGETS.items()}
    if few:
        found["lse"] = FEW.rel_rms
    if cancels:
        found |= dict.fromkeys(("dq", "dk", "dk_fp32"), CANCELLING[cancels].rel_rms)
    return found


def cpu_budgets(dtype: str) -> Mapping[str, Budget]:
    """Output -> budget of the CPU backend for operands of this dtype; lse has that of every device."""
    return {name: CPU["float32" if name.endswith("_fp32") else dtype] for name in BUDGETS if name != "lse"}
