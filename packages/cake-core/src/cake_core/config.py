"""Which variant and options an op runs with. The only place that holds the configuration; torch-free.

The state is one frozen object that ``configure`` replaces whole, so a reader that takes it once sees one configuration,
and the per-call reads are two attribute and dictionary look-ups without a lock.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from . import env, registry
from .errors import check_int, check_str, closest, message
from .spec import OpSpec

__all__ = [
    "DETERMINISTIC_DEST",
    "POOL_DEST",
    "apply_log_level",
    "check_deterministic",
    "check_pool_bytes",
    "configure",
    "generation",
    "log_once",
    "option",
    "pool_bytes",
    "snapshot",
    "torch_deterministic",
    "variant",
    "variant_is_default",
    "warn_runs_det",
]

DETERMINISTIC_DEST = "deterministic_mode"
POOL_DEST = "cake_workspace_pool_bytes"
_log = logging.getLogger("cake")


@dataclass(frozen=True, slots=True)
class _State:
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What was asked for, checked; a dest that is missing has its default."""
    deterministic: bool = False
    pool_bytes: int = 0
    generation: int = 0
    reasons: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])
    """Op -> what was logged about it, in order. Lives as long as the configuration."""
    variants: dict[str, str] = field(default_factory=dict[str, str])
    """Memo; emptied with the configuration and with the registry, never in place."""
    options: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Memo like ``variants``: op -> dest -> value."""


_state = _State()
_lock = threading.Lock()
_log_level_applied = False


def variant(op: str) -> str:
    """ "det" or "fast": what a call of ``op`` that starts now runs.

    Raises: ValueError for an op that is not installed, or in deterministic mode for one without det; RuntimeError for
    an op whose declaration is broken.
    """
    try:
        return _state.variants[op]
    except KeyError:
        return _resolve_variant(_state, op, "variant")


def option(op: str, dest: str) -> Any:
    """Value of the op's flag ``dest`` for a call that starts now.

    Raises: as ``variant``; ValueError for a dest that is not a flag of the op.
    """
    try:
        return _state.options[op][dest]
    except KeyError:
        return _resolve_option(_state, op, dest)


def variant_is_default(op: str) -> bool:
    """True when nothing asked for a variant: none was configured and deterministic mode is off.

    Raises: as ``op_spec``.
    """
    state = _state
    spec = registry.op_spec(op, entry="variant_is_default")
    return not state.deterministic and state.values.get(spec.variant_dest) is None


def configure(args: Any = None, /, **options: Any) -> None:
    """Replace the whole configuration of this process; what is not given returns to its default.

    Args:
        args: object with the trainer's arguments as attributes. Read are ``deterministic_mode``,
            ``cake_workspace_pool_bytes`` and the dests of the installed ops; None or a missing attribute: not given.
        options: the same names as keywords; they win over ``args``.

    Raises: TypeError for an unknown keyword or a wrong Python type; ValueError for a value that is not served or in
    conflict with deterministic mode. The previous configuration then stays in force.
    """
    global _state
    if isinstance(args, Mapping):
        raise TypeError(message("configure", "args", "a mapping", "an object with attributes", "configure(**options)"))
    specs = tuple(registry.op_spec(name) for name in registry.ops())
    known = {DETERMINISTIC_DEST, POOL_DEST}
    for spec in specs:
        known.update(flag.dest for flag in spec.flags)
        if spec.has_variant_flag:
            known.add(spec.variant_dest)
    for name in options:
        if name not in known:
            raise _unknown_keyword(name, known)

    def given(dest: str) -> Any:
        return options[dest] if dest in options else getattr(args, dest, None)

    deterministic = check_deterministic(given(DETERMINISTIC_DEST), entry="configure")
    bound = check_pool_bytes(given(POOL_DEST), entry="configure")
    values: dict[str, Any] = {}
    for spec in specs:
        requested = given(spec.variant_dest) if spec.has_variant_flag else None
        if requested is not None:
            flag = "--" + spec.variant_dest.replace("_", "-")
            values[spec.variant_dest] = check_str(requested, flag, entry="configure", choices=spec.variants)
            if deterministic and requested != "det":
                wanted = f"'det' with deterministic_mode, or the {spec.name} op without it"
                raise ValueError(message("configure", flag, repr(requested), wanted))
        for flag in spec.flags:
            values[flag.dest] = flag.check(given(flag.dest), entry="configure")
    apply_log_level()
    with _lock:
        _state = _State(values, deterministic, bound, _state.generation + 1)


def pool_bytes() -> int:
    """Most bytes the workspace pool may keep on a device; 0: it keeps nothing."""
    return _state.pool_bytes


def generation() -> int:
    """Number of times this process was configured."""
    return _state.generation


def torch_deterministic() -> bool:
    """``torch.are_deterministic_algorithms_enabled()``, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.are_deterministic_algorithms_enabled()


def log_once(op: str, text: str) -> None:
    """Log ``text`` about ``op`` once per configuration; ``snapshot()`` lists it."""
    _log_once(op, text, text)


def warn_runs_det(op: str, reason: str) -> None:
    """Log once per configuration that a call of ``op`` runs det although fast is configured, and why."""
    _log_once(op, reason, "runs det instead of the configured variant: " + reason)


def snapshot() -> dict[str, Any]:
    """The resolved configuration as plain data, and per op what ``warn_runs_det`` and ``log_once`` said so far.

    Keys: ``generation`` (0: never configured), ``deterministic_mode``, ``cake_workspace_pool_bytes`` and ``ops``: op ->
    ``variant`` (None where a call would raise, then ``error`` says why), ``variant_is_default``, ``options`` and
    ``reasons``.
    """
    state = _state
    ops: dict[str, dict[str, Any]] = {}
    for name in registry.ops():
        spec = registry.op_spec(name)
        asked = state.deterministic or state.values.get(spec.variant_dest) is not None
        ops[name] = {"variant": None, "variant_is_default": not asked, "options": dict(_options(state, spec))}
        try:
            ops[name]["variant"] = _resolve_variant(state, name, "variant")
        except ValueError as error:
            ops[name]["error"] = str(error)
    with _lock:
        for name in {*ops, *state.reasons}:
            ops.setdefault(name, {})["reasons"] = list(state.reasons.get(name, ()))
    return {
        "generation": state.generation,
        DETERMINISTIC_DEST: state.deterministic,
        POOL_DEST: state.pool_bytes,
        "ops": ops,
    }


def check_deterministic(value: Any, *, entry: str) -> bool:
    """The value of ``deterministic_mode``; None is False. Raises: TypeError for anything but a bool."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise TypeError(message(entry, "--deterministic-mode", f"{value!r} ({type(value).__name__})", "True or False"))


def check_pool_bytes(value: Any, *, entry: str) -> int:
    """The bound of the workspace pool; None is 0. Raises: TypeError unless an int, ValueError below 0."""
    return 0 if value is None else check_int(value, "--cake-workspace-pool-bytes", entry=entry, minimum=0)


def apply_log_level() -> None:
    """Give the logger ``cake`` the level of ``CAKE_LOG``, once per process so that an application can change it later.

    Raises: ValueError for a name that is not a level.
    """
    global _log_level_applied
    name = env.log_level()
    if name is not None and not _log_level_applied:
        levels = logging.getLevelNamesMapping()
        if name.upper() not in levels:
            raise ValueError(message("cake", "CAKE_LOG", repr(name), "one of " + ", ".join(sorted(levels))))
        _log.setLevel(levels[name.upper()])
    _log_level_applied = True


def _resolve_variant(state: _State, op: str, entry: str) -> str:
    spec = registry.op_spec(op, entry=entry)
    has_det = "det" in spec.variants
    if state.deterministic:
        if not has_det:
            got = f"{op!r} with the variants {spec.variants}"
            wanted = "one that has det, which deterministic_mode asks for"
            raise ValueError(message(entry, "op", got, wanted, "configure without deterministic_mode"))
        value = "det"
    else:
        value = state.values.get(spec.variant_dest) or ("det" if has_det else spec.variants[0])
    state.variants[op] = value
    return value


def _resolve_option(state: _State, op: str, dest: str) -> Any:
    spec = registry.op_spec(op, entry="option")
    options = _options(state, spec)
    if dest not in options:
        flags = ", ".join(options) or "none, the op has no flags"
        raise ValueError(message("option", "dest", repr(dest), f"a flag of {op}: {flags}{closest(str(dest), options)}"))
    state.options[op] = options
    return options[dest]


def _options(state: _State, spec: OpSpec) -> Mapping[str, Any]:
    return {flag.dest: state.values.get(flag.dest, flag.default) for flag in spec.flags}


def _unknown_keyword(name: str, known: set[str]) -> TypeError:
    for op in registry.failures():
        if name.startswith(f"cake_{op}_"):
            reason = f"the op {op} is disabled: {registry.failures()[op]}"
            return TypeError(message("configure", "keyword", repr(name), "a known option", reason))
    missing = [op for op in registry.KNOWN_OPS if name.startswith(f"cake_{op}_") and op not in registry.ops()]
    remedy = registry.install_hint(max(missing, key=len)) if missing else ""
    wanted = "a known option" + closest(name, known)
    return TypeError(message("configure", "keyword", repr(name), wanted, remedy))


def _log_once(op: str, reason: str, text: str) -> None:
    reasons = _state.reasons
    if reason in reasons.get(op, ()):
        return
    with _lock:
        said = reasons.setdefault(op, {})
        if reason in said:
            return
        said[reason] = None
    _log.warning("%s: %s", op, text)


def _forget_memos() -> None:
    global _state
    with _lock:
        _state = replace(_state, variants={}, options={})


registry.subscribe(_forget_memos)


def _after_fork() -> None:
    """A thread that held the lock does not exist in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
