"""
Options of a Slurm job, checked. Pure.

Rules of this file: a value holds no line break, so that ``sbatch`` reads it as it was given. Options that the script
writes cannot be given a second time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from attrs import frozen

from elasticlib.errors import ConfigError

SlurmValue: TypeAlias = str | int | float | bool
"""Value of an option of sbatch; True: the option has no value, False: it is left out."""

_NAME = re.compile("[a-z][a-z0-9-]*")
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|UNLIMITED")
"""(source: ``man sbatch``, ``--time``)"""
HIDDEN = re.compile("[\x00-\x1f\x7f]")
_OF_FIELDS = {"nodes": "nodes", "time": "time", "partition": "partition", "requeue": "requeue", "no-requeue": "requeue"}
"""{option of sbatch: the field that gives it}."""
_OF_SCRIPT = frozenset(
    "array chdir error export export-file help input kill-on-bad-exit no-kill ntasks ntasks-per-core ntasks-per-gpu "
    "ntasks-per-node open-mode output parsable quiet test-only usage version wait wrap".split()
)
"""Options that the script sets, or with which no program could follow the job."""


@frozen
class BatchOptions:
    """Checked options of a Slurm job."""

    nodes: int
    time: str | int | None = None
    """Such as ``1:00:00``, or minutes."""
    partition: str | None = None
    more: Mapping[str, SlurmValue] = {}
    """Other options of sbatch, without their dashes: ``{"gpus-per-node": 8}``."""
    requeue: bool | int = False
    """Most times that the job is requeued; True: any number of times."""

    def __attrs_post_init__(self) -> None:
        _check_numbers(self.nodes, self.requeue)
        _check_time(self.time)
        if self.partition is not None:
            _check_text("partition", self.partition)
        _check_more(self.more)

    def lines(self, name: str) -> tuple[str, ...]:
        """Return the options for ``sbatch`` of a job with this *name*, unless `more` has one."""
        fields: dict[str, SlurmValue] = {
            "job-name": name_of_job(name),
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "no-kill": True,
            "requeue": bool(self.requeue),
            "no-requeue": not self.requeue,
            "open-mode": "append",
            "export": "ALL",
            "time": _or_none(self.time),
            "partition": _or_none(self.partition),
        }
        return _options({**fields, **self.more})

    def lines_of_step(self, name: str = "") -> tuple[str, ...]:
        """Return options for ``srun``; *name* is that of a step in the job of somebody else."""
        # A step does not get --cpus-per-task from its job (since Slurm 22.05).
        fields: dict[str, SlurmValue] = {"cpus-per-task": self.more.get("cpus-per-task", False)}
        if name:
            fields.update({"job-name": name, "time": _or_none(self.time)})
        return _options(fields)


def _or_none(value: str | int | None) -> SlurmValue:
    """Return *value* as that of an option, which is left out without one."""
    return False if value is None else value


def name_of_job(title: str) -> str:
    """Return the *title* of a launch as the name of a job or file."""
    return re.sub(r"[^\w.+-]+", "_", title, flags=re.ASCII).strip("_.-")[:64] or "job"


def _options(values: Mapping[str, SlurmValue]) -> tuple[str, ...]:
    given = {name: value for name, value in values.items() if value is not False}
    return tuple(f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items())


def _check_time(time: Any) -> None:
    is_number = type(time) is int and time >= 1
    is_text = isinstance(time, str) and _TIME.fullmatch(time) is not None
    if time is not None and not is_number and not is_text:
        raise ConfigError.of_setting(
            "time", f"{time!r} must be a time of Slurm, such as '1:30:00' or '2-12:00', or a number of minutes"
        )


def _check_numbers(nodes: Any, requeue: Any) -> None:
    if type(nodes) is not int or nodes < 1:
        raise ConfigError.of_setting("nodes", f"{nodes!r} must be a number of nodes, 1 or more")
    if type(requeue) not in (bool, int) or requeue < 0:
        raise ConfigError.of_setting("requeue", f"{requeue!r} must be True, False or a number of times, 0 or more")


def _check_more(more: Any) -> None:
    if not isinstance(more, Mapping):
        raise ConfigError.of_setting("sbatch", f"{more!r} must be a dict, such as {{'gpus-per-node': 8}}")
    for name, value in more.items():
        complaint = _complaint_about(name)
        if complaint:
            raise ConfigError.of_setting("sbatch", f"{name!r} {complaint}")
        if type(value) not in (bool, int, float):
            _check_text(f"sbatch[{name!r}]", value)


def _complaint_about(name: Any) -> str:
    """Return why *name* cannot be an option of its own; empty if it can."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return "is not a long option of sbatch: give its name without dashes before it, such as gpus-per-node"
    if name in _OF_FIELDS:
        return f"cannot be given there: give {_OF_FIELDS[name]}="
    if name in _OF_SCRIPT:
        return "cannot be given: the script needs its own value"
    return ""


def _check_text(setting: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigError.of_setting(setting, f"{value!r} must be a text or a number, not {type(value).__name__}")
    if not value or HIDDEN.search(value):
        raise ConfigError.of_setting(setting, f"{value!r} must be one line of text")
