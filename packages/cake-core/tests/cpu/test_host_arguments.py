"""``check_bool``: what counts as a flag, and how everything else is named. Torch-free."""

from __future__ import annotations

from typing import Any

import pytest
from cake_core.errors import check_bool


@pytest.mark.parametrize(("value", "optional"), [(True, False), (False, False), (True, True), (None, True)])
def test_a_flag_is_returned(value: Any, optional: bool) -> None:
    assert check_bool(value, "flag", entry="f", optional=optional) is value


@pytest.mark.parametrize(
    ("value", "optional", "text"),
    [
        (1, False, "f: flag is 1 (int); needs True or False"),
        (None, False, "f: flag is None (NoneType); needs True or False"),
        ("no", True, "f: flag is 'no' (str); needs True, False or None"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, optional: bool, text: str) -> None:
    with pytest.raises(TypeError) as refused:
        check_bool(value, "flag", entry="f", optional=optional)
    assert str(refused.value) == text
