"""The compilers made of shell scripts find headers as real ones do; otherwise a build test could pass for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from cake_core import build, manifest, toolchain
from cake_core.build import BuildError
from cake_core.testing.fake_toolchain import FakeToolchain, write_kernels

SHARED = "cake/v1/ffi.h"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package over the shared headers, fake compilers and an empty cache."""
    for name, value in FakeToolchain(tmp_path / "tools").environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    toolchain.forget()
    return write_kernels(tmp_path / "kernels", top='core_headers = "cake/v1"')


def built(kernels: Path, *headers: str) -> str:
    """What the library is made of when its binding includes these headers."""
    lines = [f'#include "{header}"' for header in headers]
    (kernels / "csrc" / "alpha_binding.cc").write_text("\n".join([*lines, "// alpha\n"]))
    manifest.write(kernels)
    found = manifest.load_manifest(kernels)
    (path,) = build.build(found, found.names())
    return path.read_text()


def test_a_header_beside_the_source_and_one_of_an_include_folder_are_both_pasted_in(kernels: Path) -> None:
    shared = (Path(build.__file__).parent / "include" / SHARED).read_text()
    for headers in ((SHARED, "common.h"), ("common.h", SHARED)):
        library = built(kernels, *headers)
        assert shared in library
        assert library.count("// shared by all") == 2  # the kernel includes it too


@pytest.mark.parametrize("headers", [("nowhere.h", "common.h"), ("common.h", "nowhere.h")])
def test_a_header_that_is_nowhere_fails_the_compile(kernels: Path, headers: tuple[str, ...]) -> None:
    with pytest.raises(BuildError, match=r"alpha_binding\.cc: nowhere\.h: no such file"):
        built(kernels, *headers)
