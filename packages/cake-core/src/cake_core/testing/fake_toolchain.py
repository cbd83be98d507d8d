"""A CUDA toolkit and host compiler made of shell scripts, and small kernel packages for them.

The scripts take a few milliseconds, log every start and end, can be slow, fail or print what ptxas would print. Their
"objects" and "libraries" are the text of the sources with their quoted includes pasted in, from the source's folder or
an ``-I`` one, so a test can see which bytes a library was made from.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Call", "FakeToolchain", "write_kernels"]

_NVCC = """\
#!/bin/sh
case "$1" in
--version) exec cat @FOLDER@/nvcc.version ;;
--dryrun) exec cat @FOLDER@/nvcc.dryrun >&2 ;;
esac
exec @FOLDER@/compile nvcc "$@"
"""
_CXX = """\
#!/bin/sh
[ "$1" = --version ] && exec cat @FOLDER@/cxx.version
exec @FOLDER@/compile c++ "$@"
"""
_COMPILE = """\
#!/bin/sh
tool=$1; shift; source=; output=; objects=; folders=; unit=link
while [ $# -gt 0 ]; do
  case "$1" in
  -c) source=$2; unit=$2; shift ;;
  -o) output=$2; shift ;;
  -I*) folders="$folders ${1#-I}" ;;
  *.o) objects="$objects $1" ;;
  esac
  shift
done
[ "$unit" = link ] && unit=link:${output##*/}
printf 'start %s %s %s\\n' "$tool" "$unit" "$PPID" >> @FOLDER@/calls
[ -e @FOLDER@/delay ] && sleep "$(cat @FOLDER@/delay)"
if [ -n "$source" ]; then
  if grep -q '#error' "$source"; then
    cat @FOLDER@/padding "$source" >&2
    printf 'failed %s %s %s\\n' "$tool" "$unit" "$PPID" >> @FOLDER@/calls
    exit 2
  fi
  [ "$tool" = nvcc ] && cat @FOLDER@/stderr >&2
  { cat "$source"; sed -n 's/^#include "\\(.*\\)"/\\1/p' "$source" | while read -r header; do
    for folder in "$(dirname "$source")" $folders; do
      [ -e "$folder/$header" ] && cat "$folder/$header" && continue 2
    done
    echo "$source: $header: no such file" >&2; exit 1
  done; } > "$output" || exit 1
else
  cat $objects > "$output" || exit 1
fi
printf 'end %s %s %s\\n' "$tool" "$unit" "$PPID" >> @FOLDER@/calls
"""
_DRYRUN = """\
#$ _NVVM_BRANCH_=nvvm
#$ TOP={root}/bin/..
#$ INCLUDES="-I{root}/bin/../include"
#$ SYSTEM_INCLUDES="-isystem" "{root}/bin/../include/cccl"
#$ LIBRARIES=  "-L{root}/bin/..//lib64/stubs" "-L{root}/bin/..//lib64"
"""
_TOML_PROGRAM = """
[[program]]
name = "{name}"
sources = ["csrc/{name}.cu", "csrc/{name}_binding.cc"]
archs = {archs}
{more}
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the compilers' log."""

    state: str
    """"start", "end" or "failed"."""
    tool: str
    """"nvcc" or "c++"."""
    unit: str
    """The source as it was named on the command line, or "link:<file>"."""
    caller: int
    """Process that ran the compiler."""


class FakeToolchain:
    """Scripts ``bin/nvcc`` and ``bin/c++`` and a toolkit folder, all below ``folder``."""

    def __init__(self, folder: Path, *, version: str = "13.0.88", cxx: str = "c++ (fake) 1.2.3") -> None:
        self.folder = folder
        self.root = folder / "toolkit"
        self.nvcc, self.cxx = folder / "bin" / "nvcc", folder / "bin" / "c++"
        for made in ("bin", "toolkit/bin", "toolkit/include/cccl", "toolkit/lib"):
            (folder / made).mkdir(parents=True, exist_ok=True)
        for file, text in ((self.nvcc, _NVCC), (self.cxx, _CXX), (folder / "compile", _COMPILE)):
            file.write_text(text.replace("@FOLDER@", str(folder)))
            file.chmod(0o755)
        (folder / "nvcc.dryrun").write_text(_DRYRUN.format(root=self.root))
        for name in ("calls", "stderr", "padding"):
            (folder / name).write_text("")
        self.set_version(version)
        self.set_cxx(cxx)

    def environment(self) -> dict[str, str]:
        """The variables that make this process, or a child, use it."""
        return {"CAKE_NVCC": str(self.nvcc), "CAKE_CXX": str(self.cxx)}

    def set_version(self, version: str) -> None:
        """Release another toolkit: "13.0.88"."""
        major, minor, _ = version.split(".")
        (self.folder / "nvcc.version").write_text(
            f"nvcc: fake\nCuda compilation tools, release {major}.{minor}, V{version}\n"
        )
        header = f"#define CUDART_VERSION  {int(major) * 1000 + int(minor) * 10}\n"
        (self.root / "include" / "cuda_runtime_api.h").write_text(header)
        (self.root / "lib" / f"libcudart.so.{major}").write_text("")

    def set_cxx(self, identity: str) -> None:
        """Change the first line of ``c++ --version``."""
        (self.folder / "cxx.version").write_text(f"{identity}\nmore lines\n")

    def set_delay(self, seconds: float) -> None:
        """How long every compile and link takes from now on."""
        (self.folder / "delay").write_text(str(seconds))

    def set_stderr(self, text: str) -> None:
        """What nvcc prints from now on."""
        (self.folder / "stderr").write_text(text)

    def set_padding(self, text: str) -> None:
        """What a failing compiler prints before the source."""
        (self.folder / "padding").write_text(text)

    def calls(self, state: str | None = None, unit: str | None = None) -> list[Call]:
        """The log, or its lines with this state and a unit that contains this text."""
        found: list[Call] = []
        for line in (self.folder / "calls").read_text().splitlines():
            name, tool, source, caller = line.split()
            if state in (None, name) and (unit is None or unit in source):
                found.append(Call(name, tool, source, int(caller)))
        return found

    def forget_calls(self) -> None:
        """Start the log anew."""
        (self.folder / "calls").write_text("")

    def wait_for(self, state: str, unit: str = "", *, count: int = 1, seconds: float = 30.0) -> list[Call]:
        """Block until the log has ``count`` such lines. Raises: TimeoutError."""
        end = time.monotonic() + seconds
        while len(found := self.calls(state, unit)) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"no {count} lines {state} {unit} in {self.calls()}")
            time.sleep(0.01)
        return found

    def most_at_once(self) -> int:
        """How many compilers ran at the same time at most."""
        running = most = 0
        for call in self.calls():
            running += 1 if call.state == "start" else -1
            most = max(most, running)
        return most


def write_kernels(
    folder: Path,
    programs: Iterable[str] = ("alpha",),
    *,
    package: str = "cake_demo",
    archs: Iterable[str] = ("sm_90a",),
    top: str = "",
    more: Mapping[str, str] | None = None,
) -> Path:
    """A ``kernels`` folder with one .cu, one binding and the shared ``common.h``; no build.json yet.

    Args:
        top: further top-level lines of libraries.toml.
        more: program -> further lines of its table.
    """
    listed = "[" + ", ".join(f'"{arch}"' for arch in archs) + "]"
    text = f'package = "{package}"\n{top}\n'
    (folder / "csrc").mkdir(parents=True, exist_ok=True)
    (folder / "csrc" / "common.h").write_text("// shared by all\n")
    for name in programs:
        text += _TOML_PROGRAM.format(name=name, archs=listed, more=(more or {}).get(name, ""))
        for source in (f"{name}.cu", f"{name}_binding.cc"):
            (folder / "csrc" / source).write_text(f'#include "common.h"\n// {source}\n')
    (folder / "libraries.toml").write_text(text)
    return folder
