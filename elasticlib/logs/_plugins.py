"""
Log specifications of other packages, by the name of their entry point.

Rules of this file: plug-ins are entry points of the group ``torchrun.logs_specs``, so that plug-ins of
torchrun work here. If several packages use one name, the first on the search path is used, as in
torchrun, but with a warning. torch's own distribution declares ``default``: here it means elasticlib's
default, with or without torch.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from elasticlib.errors import ConfigError, LogDirError
from elasticlib.logs._specs import DefaultLogsSpecs
from elasticlib.spec import LogsSpecs, Std

GROUP = "torchrun.logs_specs"
DEFAULT = "default"

logger = logging.getLogger(__name__)


def known_logs_specs() -> list[str]:
    """Return the names that `load_logs_specs` accepts, sorted."""
    return sorted({DEFAULT, *(point.name for point in entry_points(group=GROUP))})


def load_logs_specs(name: str) -> Callable[..., LogsSpecs]:
    """
    Return a function that makes specifications from log_dir, redirects, tee and local_ranks_filter.

    A class that was written for another launcher gets streams of its ``Std``, since it may
    check the type. Raises `ConfigError`:

    * for a *name* that no installed package has, with the known names
    * for a plug-in that cannot be imported, from its own exception
    * for a plug-in that is not a class of log specifications

    The returned function raises it if the plug-in refuses the values.
    """
    points = _entry_points_of(name)
    if len(points) > 1:
        first, *rest = [_source(name, point) for point in points]
        logger.warning("logs_specs=%r: %s is used, not %s", name, first, " or ".join(rest))
    if not points or _is_torchs(name, points[0]):
        return DefaultLogsSpecs
    return functools.partial(_make, name, _checked(name, points[0]))


def _entry_points_of(name: str) -> list[EntryPoint]:
    """Return the entry points of *name*; the default may have none. Raises `ConfigError`."""
    # By value: a package that is installed twice has the same value twice.
    by_value = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if not by_value and name != DEFAULT:
        raise ConfigError.of_setting(
            "logs_specs",
            f"{name!r} is not an installed log specification (entry points of the group {GROUP}): give one "
            f"of {', '.join(known_logs_specs())}, or install its package",
        )
    return [*by_value.values()]


def _make(
    name: str,
    kind: Callable[..., Any],
    *,
    log_dir: str | None = None,
    redirects: Std | Mapping[int, Std] = Std.NONE,
    tee: Std | Mapping[int, Std] = Std.NONE,
    local_ranks_filter: Iterable[int] | None = None,
) -> LogsSpecs:
    std = _std_of(kind)
    try:
        specs = kind(
            log_dir=log_dir,
            redirects=_as(std, redirects),
            tee=_as(std, tee),
            # A set, since torch's classes declare one.
            local_ranks_filter=None if local_ranks_filter is None else set(local_ranks_filter),
        )
    except ConfigError:
        raise
    except Exception as error:
        refusal = LogDirError if isinstance(error, OSError) else ConfigError
        raise refusal(
            f"logs_specs={name!r}: {_title(kind)} cannot be created with log_dir={log_dir!r}, redirects={redirects!r}, "
            f"tee={tee!r}, local_ranks_filter={local_ranks_filter!r}: {type(error).__name__}: {error}"
        ) from error

    _refuse_another_kind(name, specs)
    return specs  # type: ignore[no-any-return]


def _checked(name: str, point: EntryPoint) -> Callable[..., Any]:
    source = f"logs_specs={name!r}: {_source(name, point)}"
    try:
        found = point.load()
    except Exception as error:
        raise ConfigError(f"{source} cannot be imported: {type(error).__name__}: {error}") from error

    if not callable(found):
        raise ConfigError(f"{source} is {found!r}, not a class")
    if not isinstance(found, type):
        # A function shows only by its call what it makes: that is checked there.
        return found  # type: ignore[no-any-return]

    _refuse_another_kind(name, found)
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{source} does not define {', '.join(missing)}")

    return found


def _refuse_another_kind(name: str, found: object) -> None:
    missing = [each for each in ("reify", "root_log_dir") if not _has_member(found, each)]
    if missing:
        raise ConfigError.of_setting(
            "logs_specs", f"{name!r}: {_title(found)} lacks {', '.join(missing)}, which every LogsSpecs needs"
        )


def _has_member(found: object, name: str) -> bool:
    # Static: a property may fail before `reify`, so it must not be evaluated.
    return inspect.getattr_static(found, name, None) is not None


def _std_of(kind: object) -> Callable[[int], Any]:
    """Return the ``Std`` that the base classes of *kind* use: ours, unless their modules have another."""
    # A function has no base classes.
    for base in getattr(kind, "__mro__", ()):
        std = getattr(sys.modules.get(base.__module__), "Std", None)
        if isinstance(std, type) and issubclass(std, enum.IntFlag):
            return std
    return Std


def _as(std: Callable[[int], Any], streams: Std | Mapping[int, Std]) -> Any:
    if isinstance(streams, Mapping):
        return {rank: std(int(value)) for rank, value in streams.items()}
    return std(int(streams))


def _is_torchs(name: str, point: EntryPoint) -> bool:
    # torch's class has bugs that ours does not have, and needs torch.
    return name == DEFAULT and point.value.startswith("torch.distributed.")


def _source(name: str, point: EntryPoint) -> str:
    if _is_torchs(name, point):
        return "elasticlib's own"
    package = "an unknown package" if point.dist is None else point.dist.name
    return f"{point.value} of {package}"


def _title(found: object) -> str:
    # The name of a class or a function; for any other object, of its class.
    named: Any = found if hasattr(found, "__qualname__") else type(found)
    return f"{named.__module__}.{named.__qualname__}"
