"""The prebuild promise: after one ``prebuild`` no call of the op compiles anything."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..lifecycle import prebuild, release
from ..loader import no_build

__all__ = ["check_routes", "empty_cache"]


@contextmanager
def empty_cache() -> Iterator[str]:
    """A build cache without libraries for the block, removed after it; yields the folder."""
    before = os.environ.get("CAKE_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="cake-cache-") as folder:
        os.environ["CAKE_CACHE_DIR"] = folder
        try:
            yield folder
        finally:
            if before is None:
                del os.environ["CAKE_CACHE_DIR"]
            else:
                os.environ["CAKE_CACHE_DIR"] = before


def check_routes(op: str, routes: Mapping[str, Mapping[str, Any]], run: Callable[..., None], **params: Any) -> None:
    """Prebuild ``op`` once into an empty cache, then call ``run(**route)`` for every route with builds forbidden.

    Args:
        routes: id -> keyword arguments of ``run``, the ``ROUTES`` of the op's ``testing.routes``.
        run: one call of the op; ``run_route`` of the same module.
        params: of ``prebuild``: the op's parameters, and ``device`` or ``arch`` where the current device is not meant.

    Use a process in which the op has not run yet: a library that is loaded already is not looked up again.
    Raises: AssertionError without a route; BuildForbidden for a library that ``prebuild`` left out, and whatever
    ``run`` raises, each with a note that names the route.
    """
    assert routes, f"{op}: no route to check"
    with empty_cache():
        release(op)
        prebuild(op, **params)
        try:
            with no_build():
                for name, route in routes.items():
                    try:
                        run(**route)
                    except Exception as error:
                        error.add_note(f"op {op!r}, route {name!r}: {dict(route)}")
                        raise
        finally:
            release(op)
