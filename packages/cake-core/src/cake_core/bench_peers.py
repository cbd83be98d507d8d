"""Peers of a benchmark script: which of them are there, and letting them compile before anything is timed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .bench import absence

__all__ = ["load_peers", "side_by_side", "warm_pass"]

_Operands = TypeVar("_Operands")
_Peer = TypeVar("_Peer")


def load_peers(
    peers: MutableMapping[str, Callable[[_Operands], _Peer]],
    operands: _Operands,
    absent: list[dict[str, str]],
    *,
    op: str,
    shape: str,
) -> dict[str, _Peer]:
    """The peers on these operands. One that cannot be imported leaves ``peers``: it is not asked again. ``absent``
    receives those that are not there, with the reason."""
    built: dict[str, _Peer] = {}
    for name, load in [*peers.items()]:
        try:
            built[name] = load(operands)
        except ImportError as error:
            absent.append(absence(error, impl=name, op=op))
            del peers[name]
        except Exception as error:
            absent.append(absence(error, impl=name, op=op, shape=shape))
    return built


def side_by_side(
    commands: Mapping[str, Sequence[str]], say: Callable[[str], object], *, at_once: int | None = None
) -> int:
    """Runs commands by name, all of them or ``at_once`` at a time; ``say`` gets what each printed. 1 if one failed."""

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    failed, begin = False, time.monotonic()
    with ThreadPoolExecutor(at_once or max(1, len(commands))) as pool:
        for name, done in zip(commands, pool.map(run, commands.values()), strict=True):
            failed |= done.returncode != 0
            say(f"== {name}: exit {done.returncode}, {time.monotonic() - begin:.0f} s\n{done.stdout}")
    return int(failed)


def warm_pass(
    name: str,
    pass_: str,
    shape: str,
    find: Callable[[], Callable[[], object] | None],
    say: Callable[[str], object],
    *,
    device: str,
) -> None:
    """Runs one pass of a peer once; ``say`` gets how long it took. A pass that fails is named and no failure of this
    run: the timing run leaves it out with the same reason.

    Args:
        find: gives the pass, or None where the peer has none, and may fail itself.
        device: "cuda" or "cpu".
    """
    import torch

    begin = time.monotonic()
    try:
        run = find()
        if run is None:
            return
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        what = "ran"
    except Exception as error:
        what = absence(error, impl=name)["reason"]
    say(f"warm {name} {pass_} {shape}: {time.monotonic() - begin:.1f} s, {what}")
