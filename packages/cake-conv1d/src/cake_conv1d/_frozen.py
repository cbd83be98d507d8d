"""SHA-256 of the outputs that are promised not to change: the frozen bits of the CUDA kernels.

The order of every sum and the partition of the backward are part of what ``det`` promises between releases. A release
that changes one of these hashes changes results bit for bit, and says so in its changelog.
``testing.steps.frozen_step`` makes the operands.
"""

from __future__ import annotations

__all__ = ["LINEAR", "SILU", "STATES", "Case"]

Case = tuple[tuple[int, ...], int, int, str]
"""Lengths of the documents (one: no offsets are passed), channels, taps, dtype of the taps."""

# Hashes of y, dx, dweight without an activation: IEEE arithmetic alone, so every architecture and the emulation on the
# CPU have them. One and several partial rows and blocks, full and partial tiles, documents shorter than the halo.
LINEAR: dict[Case, tuple[str, str, str]] = {
    ((1,), 8, 4, "bfloat16"): ("01a48bca4c9afa63", "88d5c6e5aae3150f", "d3003a061e531bf9"),
    ((37,), 264, 4, "float32"): ("e40d0aad51482e6a", "122479614b7f55df", "1c250a573a9a7b06"),
    ((0, 1, 2, 3, 0, 33, 94, 0), 136, 4, "bfloat16"): ("b082181410a9bbe4", "b996539d87807563", "f89f01c310658bce"),
    ((5, 128, 2, 65), 512, 3, "float32"): ("567e583bdfb82f08", "b0de4521e8bff66f", "fe04795c755bdaa5"),
    ((300, 1, 299), 264, 2, "bfloat16"): ("48aec5e1f69982d6", "126f60ddd92d3da9", "1bbebb043dc1d98f"),
    ((1, 2100, 0, 47), 16, 4, "float32"): ("ba27a37145572135", "b77d605d80b59f61", "047916c37208a083"),
    ((40, 500), 8192, 4, "bfloat16"): ("31ca1c80e12928c7", "6c4f66f4d291f7d5", "4dd2241cac8d09b1"),
}

# Hashes of y, final_state, dx, dweight, d_initial_state without an activation, with states in the dtype of the taps.
STATES: dict[Case, tuple[str, str, str, str, str]] = {
    ((0, 1, 2, 3, 0, 33, 94, 0), 136, 4, "bfloat16"): (
        "cbe60639d8ddafdf",
        "ce1b7e61fe803858",
        "652b18ab900d8cfb",
        "4b410b4e5c78ebf1",
        "59b35816180b7602",
    ),
    ((2, 0, 70), 24, 3, "float32"): (
        "d71526d28e093195",
        "f5e2b53a07d13d0d",
        "0c84e6e767d26dbf",
        "e86b86028c9199a1",
        "6f31584be6e2e3c2",
    ),
}

# (case, policy) -> hashes of y, dx, dweight with SiLU. ex2.approx and rcp.approx are in them: they are promised for
# devices of compute capability 9.0.
SILU: dict[tuple[Case, str], tuple[str, str, str]] = {
    (((37,), 264, 4, "float32"), "bf16"): ("bdd9f0adc82b6928", "4e3a3e5b7428f49a", "2355c6ba93778ffe"),
    (((0, 1, 2, 3, 0, 33, 94, 0), 136, 4, "bfloat16"), "bf16"): (
        "c4ec730de100e5f4",
        "b061898a7d2b152a",
        "ad2dd77b2750f961",
    ),
    (((0, 1, 2, 3, 0, 33, 94, 0), 136, 4, "bfloat16"), "fp32"): (
        "c4ec730de100e5f4",
        "55ecf1952b256931",
        "74f26a1bf4e34c96",
    ),
    (((5, 128, 2, 65), 512, 3, "float32"), "fp32"): ("9f34a2c42ed6d56d", "ff945b58d4fa9bcf", "6b8a5c4a6c1cf7ec"),
    (((300, 1, 299), 264, 2, "bfloat16"), "bf16"): ("a5c728cb6d361c7a", "b7475185e4e72c31", "64218072c355fe45"),
    (((40, 500), 8192, 4, "bfloat16"), "bf16"): ("2adad2913b4c4f27", "8a121ad482542911", "76414e34767804d3"),
    # Two blocks of tokens a partial row.
    (((4300,), 8192, 4, "bfloat16"), "bf16"): ("a0a1d0bc390ca436", "c045cd768ab17a5d", "200e8577503dea3b"),
}
