"""Tests marked ``nvcc`` are skipped, with the reason, where cake-core finds no compiler.

Shared assertions say what they compared."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.register_assert_rewrite("cake_core.testing.trainer")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("nvcc")]
    if not marked:
        return
    from cake_core import toolchain

    try:
        toolchain.find_toolchain()
        toolchain.host_compiler()
    except RuntimeError as error:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs compilers ({error})"))
    finally:
        toolchain.forget()  # the tests look for themselves
