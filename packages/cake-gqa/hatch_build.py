"""Build hook of hatchling: with ``CAKE_AOT_ARCHS`` the wheel carries compiled libraries.

``CAKE_AOT_ARCHS="sm_80 sm_90a" uv build --no-build-isolation --wheel --package NAME`` compiles every library of the
package's ops for these architectures and puts them into the wheel, which then is one for this kind of machine. It needs
cake-core and the compilers in the environment that builds. Without the variable, and in editable installations, nothing
happens and hatchling is all that a build needs. The file is the same in every package with ops.
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class AotBuildHook(BuildHookInterface[Any]):
    """Named by ``[tool.hatch.build.targets.wheel.hooks.custom]`` in pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if "CAKE_AOT_ARCHS" not in os.environ or version == "editable":
            return
        try:
            from cake_core.aot import wheel_files
        except ImportError as error:
            self.app.abort(f"CAKE_AOT_ARCHS needs cake-core where the wheel is built ({error}): --no-build-isolation")
            return
        # Removed with this object, after the wheel is written.
        self._libraries = tempfile.TemporaryDirectory(prefix="cake-aot-")
        ops = self.metadata.core.entry_points.get("cake.ops", {})
        try:
            files = wheel_files(Path(self.root, "src"), ops, Path(self._libraries.name))
        except (ImportError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
            self.app.abort(str(error))
            return
        build_data["force_include"].update({str(file): path for file, path in files.items()})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
