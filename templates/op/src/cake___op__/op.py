"""What the op is: its declaration and what it serves. Torch-free."""

from __future__ import annotations

from cake_core.errors import check_str, message
from cake_core.spec import OpSpec, Package

from . import plan

DTYPES = {"cpu": ("bfloat16", "float32", "float64"), **{arch: ("bfloat16",) for arch in plan.ARCHS}}

OP = OpSpec(
    name="__op__",
    variants=("det",),  # elementwise: nothing to relax, so there is no fast program and no variant flag
    selected_by=(("__op___backend", "cake"),),  # the trainer's flag, there spelled with dashes
    impl="cake___op__.api",
    entry_points=("__op__", "__op___bwd", "__op___fwd"),
    packages=(Package("__op__", "native", "kernels"),),
    libraries=plan.libraries,
)


def check_supported(dtype: str = "bfloat16", *, arch: str | None = None) -> None:
    """Raise unless operands of ``dtype`` are served; ``arch=None`` asks about the op as a whole.

    Raises: TypeError for an argument that is not a str; ValueError for a dtype that no backend serves;
    NotImplementedError for an architecture that is not served, or a dtype that this one does not serve.
    """
    check_str(dtype, "dtype", entry="check_supported", choices=DTYPES["cpu"])
    if arch is None:
        return
    if check_str(arch, "arch", entry="check_supported") not in DTYPES:
        raise NotImplementedError(message("check_supported", "arch", repr(arch), "one of " + ", ".join(DTYPES)))
    if dtype not in DTYPES[arch]:
        wanted = f"{' or '.join(DTYPES[arch])} on {arch}"
        raise NotImplementedError(message("check_supported", "dtype", repr(dtype), wanted, "the CPU serves it"))


def is_supported(dtype: str = "bfloat16", *, arch: str | None = None) -> bool:
    """True where ``check_supported`` raises nothing; wrong Python types raise TypeError in both."""
    try:
        check_supported(dtype, arch=arch)
    except (ValueError, NotImplementedError):
        return False
    return True
