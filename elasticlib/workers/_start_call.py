"""
The checks of a call that asks for processes, and the job that it makes.

Rules of this file: it starts nothing. It refuses calls that cannot work, with the rank of the
fault, and copies the caller's objects.
"""

from __future__ import annotations

import logging
import math
import numbers
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from attrs import evolve

from elasticlib import _rules
from elasticlib.errors import ConfigError, EntrypointError, PicklingError
from elasticlib.spec import START_METHODS, WorkerSpec
from elasticlib.workers import _environment, _machine, _packing, _plan
from elasticlib.workers.child._start_spec import StartSpec

logger = logging.getLogger(__name__)


class LocalRanksError(ConfigError, RuntimeError):
    """Raised when a mapping by local rank has other keys than 0 to n-1; a RuntimeError, as torch's."""


class VariableError(ConfigError, TypeError):
    """Raised when an environment variable of a worker is not text; a TypeError, as torch's."""


class ArgumentError(ConfigError, TypeError):
    """
    Raised when an argument has a type that is not valid there; a TypeError, as Python's own.
    """


class ProgramError(EntrypointError, FileNotFoundError):
    """
    Raised when the program to run does not exist or may not be run; a FileNotFoundError, as
    torch's.
    """


def _check_ranks(name: str, by_rank: object, count: int) -> None:
    if not isinstance(by_rank, Mapping):
        raise ConfigError.of_setting(
            name, f"{by_rank!r} must be a dictionary by local rank, such as {{0: ..., 1: ...}}"
        )
    if set(by_rank) != set(range(count)):
        raise LocalRanksError(
            f"{name} has the local ranks {list(by_rank)}, and must have exactly those from 0 to {count - 1}: "
            "args and envs need one entry for each process"
        )


def arguments(args: Mapping[int, Sequence[Any]]) -> dict[int, tuple[Any, ...]]:
    """Return *args* by local rank, in order."""
    count = len(args) if isinstance(args, Mapping) else 1
    _check_ranks("args", args, count)
    return {rank: _rules.arguments(f"args[{rank}]", args[rank]) for rank in range(count)}


def variables(envs: Mapping[int, Mapping[str, str]], count: int) -> dict[int, dict[str, str]]:
    """Return *envs* of *count* processes by local rank, in order."""
    _check_ranks("envs", envs, count)
    for rank, env in envs.items():
        if not isinstance(env, Mapping):
            raise VariableError(f"envs[{rank}]={env!r} must be a dictionary of environment variables; {{}} for none")
        for name, value in env.items():
            _check_variable(rank, name, value)
    return {rank: dict(envs[rank]) for rank in range(count)}


def _check_variable(rank: int, name: object, value: object) -> None:
    """Raise an error of the environment of *rank* for a variable that no process can have."""
    if not isinstance(name, str) or not isinstance(value, str):
        raise VariableError(f"envs[{rank}] has {name!r}: {value!r}; names and values must be strings")
    is_name = name and "=" not in name and "\0" not in name
    if not is_name or "\0" in value:
        raise ConfigError(f"envs[{rank}] has {name!r}: {value!r}, which an environment cannot contain")


def prefixes(name: object, given: object, count: int) -> dict[int, bytes]:
    """
    Return the prefixes of the lines of *count* processes, from *given* or made of their *name*.
    """
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise ArgumentError(f"log_line_prefixes={given!r} must be a dictionary by local rank, such as {{0: '[0]:'}}")

    texts = dict(given)
    _warn_of_strange_ranks(texts, count)
    for rank, text in texts.items():
        if not isinstance(text, str):
            raise ArgumentError(f"log_line_prefixes[{rank!r}]={text!r} must be a string")

    found = {}
    for rank in range(count):
        if rank in texts:
            found[rank] = _encoded(f"log_line_prefixes[{rank}]", texts[rank])
        else:
            found[rank] = _encoded("name", f"[{name}{rank}]:")

    return found


def _warn_of_strange_ranks(texts: Mapping[object, object], count: int) -> None:
    strange = [rank for rank in texts if rank not in range(count)]
    if not strange:
        return
    logger.warning(
        "log_line_prefixes names local rank%s %s, but there %s only: that has no effect",
        "s" * (len(strange) > 1),
        ", ".join(map(repr, strange)),
        "is 0" if count == 1 else f"are 0 to {count - 1}",
    )


def _encoded(setting: str, text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ConfigError.of_setting(
            setting,
            f"{text!r} cannot be encoded in UTF-8: give another string",
        ) from None


def seconds(name: str, value: object) -> float:
    """Return *value* as seconds, of any size and sign."""
    if not isinstance(value, numbers.Real):
        raise ArgumentError.of_setting(name, f"{value!r} must be a number of seconds")
    if math.isnan(value):
        raise ConfigError.of_setting(name, "nan is not a time: give seconds, math.inf for no limit")
    return float(value)


def death_signal(value: object) -> int:
    """Return the number of the signal *value*, by default SIGTERM, that asks processes to end."""
    if not value:
        return signal.SIGTERM
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(f"death_sig={value!r} must be a signal, such as signal.SIGTERM")
    if value not in signal.valid_signals():
        raise ConfigError(f"death_sig={value!r} must be a signal of this system, such as signal.SIGTERM")
    return int(value)


MakesSpec: TypeAlias = Callable[..., WorkerSpec]
"""
Makes the specification of an entry point with its arguments; it knows the settings that functions
and programs share.
"""


def of_function(
    function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]], spec: MakesSpec, start_method: str
) -> _plan.LaunchPlan:
    """Return the job whose workers call *function*, each with its own *args*."""
    _rules.check_choice("start_method", start_method, START_METHODS)

    # A class of paths may be callable too.
    is_name = isinstance(function, (str, os.PathLike))
    if is_name or not callable(function):
        raise EntrypointError(f"entrypoint={function!r} is not callable: give a program as a string")

    by_rank = tuple(args.values())
    try:
        job = _planned(spec(entrypoint=function, args=by_rank), start_method)
    except PicklingError:
        _raise_for_rank(function, args)
        raise

    job = evolve(job, common=replace(job.common, args_by_rank=True))
    if job.call is not None:
        job = evolve(job, call=lambda rank: function(*by_rank[rank]))
    return job


def _raise_for_rank(function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]]) -> None:
    """Raise the `PicklingError` of the first rank whose arguments cannot be sent, with the rank."""
    for rank, own in args.items():
        try:
            _packing.pack_call(function, own, {})
        except PicklingError as error:
            raise PicklingError(f"local rank {rank}: {error}") from error


def of_program(program: str, args: Mapping[int, tuple[Any, ...]], spec: MakesSpec) -> _plan.LaunchPlan:
    """Return the job whose workers are *program*; each adds its own arguments to the command line."""
    every = tuple(str(argument) for own in args.values() for argument in own)
    try:
        return _planned(spec(entrypoint=program, args=every, no_python=True), "forkserver")
    except EntrypointError as error:
        raise ProgramError(str(error)) from None


def _planned(spec: WorkerSpec, start_method: str) -> _plan.LaunchPlan:
    environment = _environment.without_secrets(os.environ)
    return _plan.plan(spec, start_method, environment, _thread_count(environment))


def with_threads(spec: StartSpec) -> StartSpec:
    """Return *spec* with the number of threads that the worker's own variables name, else the job's."""
    environment = spec.variables
    if _environment.THREADS_VARIABLE not in environment:
        return spec
    return replace(spec, threads=_thread_count(environment))


def _thread_count(environment: Mapping[str, str]) -> int:
    # Each worker computes with all CPUs, like any program: they are not divided among these
    # workers.
    return _environment.threads_per_worker(environment, _machine.cpu_count(), 1)
