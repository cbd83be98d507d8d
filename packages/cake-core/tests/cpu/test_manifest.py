"""build.json: both dialects, flags, digests; libraries.toml becomes build.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cake_core import cache_key
from cake_core.manifest import (
    CXX_FLAGS,
    NVCC_FLAGS,
    check,
    check_toolkit,
    cuda_matches,
    cxx_flags,
    effective_flags,
    generate,
    load_manifest,
    verify,
    write,
)
from cake_core.testing.fake_toolchain import FakeToolchain, write_kernels
from cake_core.toolchain import find_toolchain

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """Two programs, two architectures, build.json written."""
    folder = write_kernels(tmp_path / "kernels", ("alpha", "beta"), archs=("sm_80", "sm_90a"))
    assert write(folder)
    return folder


def edit(folder: Path, change: Edit) -> None:
    """Apply ``change`` to the JSON of build.json."""
    data = json.loads((folder / "build.json").read_text())
    change(data)
    (folder / "build.json").write_text(json.dumps(data))


def upstream_manifest(folder: Path) -> None:
    """A manifest as upstream's generator writes it, and its sources."""
    (folder / "csrc").mkdir()
    (folder / "csrc" / "checks.h").write_text("// checks\n")
    (folder / "csrc" / "p_kernel.cu").write_text("// kernel\n")
    (folder / "csrc" / "p_binding.cu").write_text("// binding\n")
    sources = ["csrc/p_kernel.cu", "csrc/p_binding.cu"]
    data = {
        "schema": "cake-build/1",
        "package": "flashinfer.experimental.cake_demo",
        "generator": {"cake_revision": "0" * 40, "cuda": "13.4.92", "rendered_at": "2026-01-01T00:00:00Z"},
        "arch_flags": {"sm_100a": ["-gencode=arch=compute_100a,code=sm_100a"]},
        "common": {
            "include_dirs": ["csrc"],
            "nvcc_flags": ["-std=c++17", "-O3"],
            "nvcc_flags_if": [{"cuda": ">=12.8", "flags": ["-static-global-template-stub=false"]}],
            "link_flags": ["-shared", "-lcudart", "-lcuda"],
            "link": {"cudart": "shared", "host_linker": "c++", "tvm_ffi_symbols": "load"},
            "requires": {"cuda_toolkit": {"min": "12.8"}},
        },
        "libraries": [
            {
                "name": "p_sm_100a",
                "arch": "sm_100a",
                "gencode": "-gencode=arch=compute_100a,code=sm_100a",
                "entry": "run",
                "min_cuda": "12.8",
                "nvcc_flags": ["--use_fast_math", "-DN=2"],
                "nvcc_flags_if": [{"cuda": "==13.0", "flags": ["-Xptxas=-O0"]}],
                "sources": sources,
                "sha256": {path: hashlib.sha256((folder / path).read_bytes()).hexdigest() for path in sources},
                "closure_sha256": "0" * 64,
                "path": "aot/p_sm_100a.so",
            }
        ],
    }
    (folder / "build.json").write_text(json.dumps(data))


def first(data: dict[str, Any]) -> dict[str, Any]:
    return data["libraries"][0]


BROKEN: dict[str, tuple[Edit, str]] = {
    "another schema": (lambda d: d.update(schema="cake-build/2"), "schema is 'cake-build/2'"),
    "a name twice": (lambda d: d["libraries"].append(first(d)), "'alpha_sm_80' twice"),
    "a name that is a path": (lambda d: first(d).update(name="../alpha"), "library name is '../alpha'"),
    "a source without digest": (lambda d: first(d)["sha256"].pop("csrc/alpha.cu"), "csrc/alpha.cu"),
    "a digest without source": (lambda d: first(d)["sha256"].update({"csrc/x.cu": "0" * 64}), "csrc/x.cu"),
    "a digest that is none": (lambda d: first(d)["sha256"].update({"csrc/alpha.cu": "xyz"}), "'xyz'"),
    "an arch without flags": (lambda d: d["arch_flags"].pop("sm_80"), "alpha_sm_80 arch is 'sm_80'"),
    "an arch with empty flags": (lambda d: d["arch_flags"].update(sm_80=[]), "alpha_sm_80 arch is 'sm_80'"),
    "a source outside": (lambda d: first(d).update(sources=["../a.cu"]), "'../a.cu'; needs a path inside"),
    "an absolute source": (lambda d: first(d).update(sources=["/a.cu"]), "'/a.cu'; needs a path inside"),
    "a source of another kind": (lambda d: first(d).update(sources=["a.py"]), "'a.py'; needs files that end in"),
    "include_dirs outside": (lambda d: d["common"].update(include_dirs=[".."]), "include_dirs is '..'"),
    "a header outside": (lambda d: d["headers"].update({"../x.h": "0" * 64}), "'../x.h'"),
    "no headers in our dialect": (lambda d: d.pop("headers"), "headers is NoneType"),
    "no libraries": (lambda d: d.pop("libraries"), "libraries is None"),
    "flags that are no list": (lambda d: first(d).update(nvcc_flags="-O3"), "nvcc_flags is '-O3'"),
    "a floor that is no release": (lambda d: first(d).update(min_cuda="13"), "min_cuda is '13'"),
    "an unknown limit": (lambda d: first(d).update(limits={"spills": 1}), "'spills'"),
    "a limit that is no number": (lambda d: first(d).update(limits={"smem": True}), "smem is True"),
    "a package that is a path": (lambda d: d.update(package="../../x"), "package is '../../x'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_manifest_is_refused_with_its_file(kernels: Path, case: str) -> None:
    """R27: RuntimeError naming the file and the field."""
    change, words = BROKEN[case]
    load_manifest(kernels)
    edit(kernels, change)
    with pytest.raises(RuntimeError) as error:
        load_manifest(kernels)
    assert str(error.value).startswith(f"{kernels / 'build.json'}: ")
    assert words in str(error.value)


def test_a_missing_or_unreadable_manifest_is_named(tmp_path: Path) -> None:
    """R27: no build.json, or one that is not JSON."""
    with pytest.raises(RuntimeError, match=r"build\.json is missing; .*cake manifest"):
        load_manifest(tmp_path)
    (tmp_path / "build.json").write_text("{")
    with pytest.raises(RuntimeError, match=r"build\.json is unreadable"):
        load_manifest(tmp_path)


def test_the_upstream_dialect_loads(tmp_path: Path) -> None:
    """R27: no headers, no cxx_flags, a binding that nvcc compiles; -lcuda is never linked."""
    upstream_manifest(tmp_path)
    manifest = load_manifest(tmp_path)
    assert (manifest.dialect, manifest.headers, manifest.core_headers) == ("upstream", None, None)
    library = manifest.library("p_sm_100a")
    assert effective_flags(manifest, library, (13, 0)) == (
        *("-std=c++17", "-O3", "-static-global-template-stub=false", "-gencode=arch=compute_100a,code=sm_100a"),
        *("--use_fast_math", "-DN=2", "-Xptxas=-O0"),
    )
    assert effective_flags(manifest, library, (12, 7)) == (
        *("-std=c++17", "-O3", "-gencode=arch=compute_100a,code=sm_100a", "--use_fast_math", "-DN=2"),
    )
    assert not {"-lcuda", "-lcudart"} & set(cache_key.link_flags(manifest))
    verify(manifest, manifest.names())


def test_names_are_those_of_one_architecture(kernels: Path) -> None:
    """R27: lookup by architecture and by name; an unknown name is a ValueError with the closest one."""
    manifest = load_manifest(kernels)
    assert manifest.names("sm_90a") == ("alpha_sm_90a", "beta_sm_90a")
    assert len(manifest.names()) == 4
    with pytest.raises(ValueError, match="did you mean 'alpha_sm_80'"):
        manifest.library("alpha_sm_8")


@pytest.mark.parametrize("file", ["csrc/alpha.cu", "csrc/beta_binding.cc", "csrc/common.h"])
def test_one_changed_byte_is_named_with_both_digests(kernels: Path, file: str) -> None:
    """R28: file, expected and found digest; sources and headers alike."""
    manifest = load_manifest(kernels)
    verify(manifest, manifest.names())
    expected = hashlib.sha256((kernels / file).read_bytes()).hexdigest()
    text = (kernels / file).read_text()
    (kernels / file).write_text(text.replace("/", "\\", 1))
    got = hashlib.sha256((kernels / file).read_bytes()).hexdigest()
    with pytest.raises(RuntimeError) as error:
        verify(manifest, manifest.names())
    assert all(part in str(error.value) for part in (file, expected, got, "cake manifest"))


def test_a_header_that_is_missing_or_not_listed_is_named(kernels: Path) -> None:
    """R28: the set of headers is part of what is verified."""
    manifest = load_manifest(kernels)
    (kernels / "csrc" / "new.cuh").write_text("")
    with pytest.raises(RuntimeError, match=r"csrc/new\.cuh is not listed in"):
        verify(manifest, ())
    (kernels / "csrc" / "new.cuh").unlink()
    (kernels / "csrc" / "common.h").unlink()
    with pytest.raises(RuntimeError, match=r"common\.h is unreadable"):
        verify(manifest, ())


def test_sources_of_other_libraries_are_not_read(kernels: Path) -> None:
    """R28: only what is about to be compiled is verified."""
    manifest = load_manifest(kernels)
    (kernels / "csrc" / "beta.cu").unlink()
    verify(manifest, manifest.names()[:1])


@pytest.mark.parametrize(
    ("arch", "min_cuda", "toolkit", "served"),
    [
        ("sm_80", "0.0", "12.8.61", True),
        ("sm_80", "0.0", "12.7.99", False),
        ("sm_90a", "12.0", "12.7.99", False),
        ("sm_90a", "13.1", "13.0.88", False),
        ("sm_90a", "13.1", "13.1.1", True),
        ("sm_103a", "12.8", "12.8.61", False),
        ("sm_103a", "12.8", "12.9.1", True),
        ("sm_107a", "13.0", "13.2.86", False),
        ("sm_107a", "13.0", "13.4.92", True),
        ("sm_120a", "13.0", "13.0.88", True),
    ],
)
def test_the_toolkit_floor_is_the_higher_of_two(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, min_cuda: str, toolkit: str, served: bool
) -> None:
    """R30: the library's min_cuda and the architecture's own floor; the message names both versions and the cure."""
    edit(kernels, lambda d: d["arch_flags"].update({arch: ["-gencode=x"]}))
    edit(kernels, lambda d: first(d).update(arch=arch, min_cuda=min_cuda))
    fake = FakeToolchain(tmp_path / "fake", version=toolkit)
    monkeypatch.setenv("CAKE_NVCC", str(fake.nvcc))
    library = load_manifest(kernels).library("alpha_sm_80")
    if served:
        check_toolkit(library, find_toolchain())
        return
    with pytest.raises(RuntimeError, match=r"pip install 'cake-core\[toolchain\]' 'cuda-toolkit>=1") as error:
        check_toolkit(library, find_toolchain())
    assert toolkit in str(error.value)
    assert str(fake.nvcc) in str(error.value)


@pytest.mark.parametrize(
    ("condition", "release", "met"),
    [
        ("==13.0", (13, 0), True),
        ("==13.0", (13, 1), False),
        (">=12.8", (12, 8), True),
        (">=12.8", (12, 7), False),
        (">=12.8", (13, 0), True),
        (">=12.10", (12, 9), False),
        (">=12.9", (12, 10), True),
    ],
)
def test_flag_conditions_compare_major_and_minor(condition: str, release: tuple[int, int], met: bool) -> None:
    """R31: numbers, not text: 12.10 is above 12.9."""
    assert cuda_matches(condition, release) is met


@pytest.mark.parametrize("condition", ["13.0", "<=13.0", ">=13", ">=13.0.1", "== 13.0", ">=13.0,<14.0", ""])
def test_other_flag_conditions_are_refused(condition: str) -> None:
    """R31: ValueError naming the condition."""
    with pytest.raises(ValueError, match=r"needs '==X\.Y' or '>=X\.Y'"):
        cuda_matches(condition, (13, 0))


# libraries.toml -> build.json


def test_programs_expand_over_variants_and_architectures(tmp_path: Path) -> None:
    """R87: names, defines, flags and limits of every library."""
    more = (
        "nvcc_flags = ['-lineinfo']\n"
        "limits = { registers = 100, smem = 64, sm_80 = { registers = 90 } }\n"
        "variants = [{ name = 'd64', defines = ['D=64', 'FAST'] }, { name = 'd128', limits = { smem = 128 } }]"
    )
    folder = write_kernels(tmp_path, archs=("sm_80", "sm_90a"), more={"alpha": more})
    write(folder)
    manifest = load_manifest(folder)
    assert manifest.names() == ("alpha_d128_sm_80", "alpha_d128_sm_90a", "alpha_d64_sm_80", "alpha_d64_sm_90a")
    library = manifest.library("alpha_d64_sm_80")
    assert library.nvcc_flags == ("-lineinfo", "-DD=64", "-DFAST")
    assert cxx_flags(manifest, library) == (*CXX_FLAGS, "-DD=64", "-DFAST")
    limits = {name: manifest.library(name).limits for name in manifest.names()}
    assert (limits["alpha_d64_sm_80"].registers, limits["alpha_d64_sm_80"].smem) == (90, 64)
    assert (limits["alpha_d64_sm_90a"].registers, limits["alpha_d64_sm_90a"].smem) == (100, 64)
    assert (limits["alpha_d128_sm_90a"].registers, limits["alpha_d128_sm_90a"].smem) == (100, 128)
    assert limits["alpha_d64_sm_80"].spill_bytes == 0


def test_the_manifest_has_the_documented_fields(kernels: Path) -> None:
    """R87: what another reader of the schema relies on."""
    data = json.loads((kernels / "build.json").read_text())
    assert data["extensions"] == ["cake-core/1"]
    assert set(data["headers"]) == {"csrc/common.h"}
    assert data["common"]["nvcc_flags"] == list(NVCC_FLAGS)
    assert data["common"]["link_flags"] == ["-shared", "-lcudart"]
    assert data["arch_flags"]["sm_90a"] == ["-gencode=arch=compute_90a,code=sm_90a"]
    library = first(data)
    assert library["gencode"] == " ".join(data["arch_flags"]["sm_80"])
    assert library["gencode"].endswith("code=sm_80 -gencode=arch=compute_80,code=compute_80")
    assert (library["entry"], library["min_cuda"], library["path"]) == ("run", "12.8", "aot/alpha_sm_80.so")
    closure = {
        "arch": "sm_80",
        "arch_flags": data["arch_flags"]["sm_80"],
        "cxx_flags": data["common"]["cxx_flags"],
        "entry": "run",
        "headers": data["headers"],
        "min_cuda": "12.8",
        "nvcc_flags": data["common"]["nvcc_flags"],
        "nvcc_flags_if": data["common"]["nvcc_flags_if"],
        "sources": library["sha256"],
    }
    canonical = json.dumps(closure, sort_keys=True, separators=(",", ":"))
    assert library["closure_sha256"] == hashlib.sha256(canonical.encode()).hexdigest()


def test_the_manifest_depends_on_contents_alone(kernels: Path, tmp_path: Path) -> None:
    """R90: the same files elsewhere give the same text, without any absolute path."""
    other = write_kernels(tmp_path / "elsewhere" / "deep", ("alpha", "beta"), archs=("sm_80", "sm_90a"))
    assert generate(other) == generate(kernels)
    assert str(tmp_path) not in generate(kernels)


def test_a_current_manifest_is_left_alone(kernels: Path) -> None:
    """R87: writing again changes nothing, not even the file's time."""
    before = (kernels / "build.json").stat().st_mtime_ns
    assert check(kernels) == ()
    assert not write(kernels)
    assert (kernels / "build.json").stat().st_mtime_ns == before


def test_check_says_what_is_out_of_date(kernels: Path) -> None:
    """R87: one line for each header, library or field that differs."""
    (kernels / "csrc" / "alpha.cu").write_text("// changed\n")
    assert check(kernels) == ("library alpha_sm_80 differs", "library alpha_sm_90a differs")
    write(kernels)
    (kernels / "csrc" / "new.cuh").write_text("")
    assert "header csrc/new.cuh is new" in check(kernels)
    (kernels / "csrc" / "new.cuh").unlink()
    edit(kernels, lambda d: d["common"].update(nvcc_flags=[]))
    assert check(kernels) == ("common differs",)
    edit(kernels, lambda d: d["libraries"].pop())
    assert "library beta_sm_90a is new" in check(kernels)
    edit(kernels, lambda d: d["libraries"].append({**first(d), "name": "alpha_sm_42"}))
    assert "library alpha_sm_42 is gone" in check(kernels)
    write(kernels)
    text = (kernels / "build.json").read_text()
    (kernels / "build.json").write_text(text.replace("\n", ""))
    assert check(kernels) == ("build.json is formatted differently",)
    (kernels / "build.json").unlink()
    assert check(kernels) == ("build.json is missing",)


RECIPES = {
    "a source that is missing": ("sources = ['csrc/alpha.cu']", "sources = ['csrc/none.cu']", "'csrc/none.cu'"),
    "an unknown architecture": ("archs = ['sm_80']", "archs = ['sm_42']", "'sm_42'; needs one of sm_80"),
    "an unknown key": ("archs = ['sm_80']", "archs = ['sm_80']\nflags = []", "the key 'flags'"),
    "an unknown top-level key": ("[[program]]", "sources = []\n[[program]]", "the key 'sources'"),
    "a program without name": ("name = 'alpha'\n", "", "each with a name"),
    "no program": ("[[program]]\n", "[program]\n", "each with a name"),
    "shared headers that do not exist": ("[[program]]", "core_headers = 'cake/v0'\n[[program]]", "'cake/v0'"),
    "an include folder that is missing": (
        "[[program]]",
        "include_dirs = ['inc']\n[[program]]",
        "'inc'; needs a folder",
    ),
    "two libraries of one name": (
        "archs = ['sm_80']",
        "archs = ['sm_80']\n[[program]]\nname = 'alpha'\nsources = ['csrc/alpha.cu']\narchs = ['sm_80']",
        "several libraries of one name",
    ),
    "no TOML": ("[[program]]", "[[", "unreadable"),
    "a source outside": ("sources = ['csrc/alpha.cu']", "sources = ['../kernels/csrc/alpha.cu']", "inside the package"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_broken_recipe_is_refused_with_its_file(tmp_path: Path, case: str) -> None:
    """R87: RuntimeError naming libraries.toml, or the build.json it would become."""
    folder = write_kernels(tmp_path / "kernels")
    good = "package = 'demo'\n[[program]]\nname = 'alpha'\nsources = ['csrc/alpha.cu']\narchs = ['sm_80']\n"
    (folder / "libraries.toml").write_text(good)
    assert check(folder) == ("build.json is missing",)
    old, new, words = RECIPES[case]
    assert old in good
    (folder / "libraries.toml").write_text(good.replace(old, new))
    with pytest.raises(RuntimeError) as error:
        generate(folder)
    assert str(error.value).startswith(str(folder))
    assert words in str(error.value)
