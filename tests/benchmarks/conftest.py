"""What the tests of the scripts share: how a script is loaded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from cake_core import bench, config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """``script(folder, name, *others)``: module ``name`` of a folder of the repository, imported anew with the modules
    ``others`` beside it; the ceilings of the machine are 1 and not measured."""

    def load(folder: str, name: str, *others: str) -> ModuleType:
        for module in (name, *others):
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(ROOT / folder)
        monkeypatch.setattr(bench, "_ceilings", lambda *_: {"copy_tbps": 1.0, "matmul_tflops": 1.0})
        return importlib.import_module(name)

    yield load
    config.configure()
