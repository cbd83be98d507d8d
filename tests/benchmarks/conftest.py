"""What the tests of the scripts share: how a script is loaded and what a run of a benchmark leaves."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``run(module, *arguments)``: the document of one round of a benchmark on the CPU."""

    def document(module: ModuleType, *argv: str) -> dict[str, Any]:
        path = tmp_path / "run.json"
        assert module.main(["--device", "cpu", "--rounds", "1", "--json", str(path), *argv]) == 0
        return json.loads(path.read_text())

    return document
