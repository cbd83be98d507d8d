"""What ``testing.det`` says of a fresh process; the rest of it needs a device (tests/gpu/test_det_gpu.py)."""

from __future__ import annotations

import os

import pytest
from cake_core.testing.det import assert_same_in_a_fresh_process

_HERE = __name__ != "<run_path>"  # the name that runpy gives


def same() -> str:
    return "the same"


def another() -> str:
    return str(os.getpid())


def fails_elsewhere() -> str:
    return str(1 // _HERE)


def test_a_fresh_process_says_the_same_or_the_test_fails() -> None:
    assert_same_in_a_fresh_process(same)
    with pytest.raises(AssertionError, match=rf"exit status 0:\n\d+\nthis one:\n{os.getpid()}$"):
        assert_same_in_a_fresh_process(another)
    with pytest.raises(AssertionError, match="exit status 1"):
        assert_same_in_a_fresh_process(fails_elsewhere)
