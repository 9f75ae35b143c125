"""
Binding without a launch: a command that will run on the CPUs near a GPU, or this very process.

These are the names of ``torch.numa.binding``. The functions with an underscore are those by which torch's launcher
binds, for programs that start workers themselves; launches of this library need no ``numactl``, since their workers
bind themselves before they become the user's program.

Rules of this file: a process that has not touched a device does not touch one here; what fails is raised or, where the
options say so, logged, and nothing is bound.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import loads
from typing import ParamSpec, TypeVar

from elasticlib.numa import _gpu_addresses
from elasticlib.numa._cpus import cpus_for, ranges
from elasticlib.numa._numa_options import AffinityMode, BindingError, NumaOptions, as_numa_options
from elasticlib.numa._sysfs import read_topology

__all__ = [
    "AffinityMode",
    "BindingError",
    "NumaOptions",
    "_maybe_apply_numa_binding_to_current_process",
    "_maybe_wrap_command_args_with_numa_binding",
    "_maybe_wrap_with_numa_binding",
]

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("elasticlib")
_TIMEOUT = 120.0
"""Seconds that the program which asks for the devices may take: it imports torch."""


def _maybe_wrap_command_args_with_numa_binding(
    command_args: tuple[str, ...], *, device_index: int, numa_options: NumaOptions | None
) -> tuple[str, ...]:
    """
    *command_args*, run through ``numactl`` on the CPUs near accelerator *device_index*; unchanged without options.

    Raises `BindingError` (a ``RuntimeError``) when ``numactl`` is not on PATH or the binding is not possible, unless
    the options allow to fall back: then *command_args* are unchanged, with a warning.
    (torch: ``torch.numa.binding._maybe_wrap_command_args_with_numa_binding``)
    """
    options = as_numa_options(numa_options)
    command = tuple(command_args)
    if options is not None:
        with binding_attempt(options):
            if shutil.which("numactl") is None:
                raise BindingError("numactl is not on PATH, and a command is bound through it: install numactl")
            command = ("numactl", f"--physcpubind={ranges(_cpus(options, device_index))}", *command)
    return command


def _maybe_wrap_with_numa_binding(
    func: Callable[P, R], *, device_index: int, numa_options: NumaOptions | None
) -> Callable[P, R]:
    """
    *func*, made to bind its process before it runs, as the function below does; unchanged without options.

    (torch: ``torch.numa.binding._maybe_wrap_with_numa_binding``)
    """
    if numa_options is None:
        return func

    @functools.wraps(func)
    def bound(*args: P.args, **kwargs: P.kwargs) -> R:
        _maybe_apply_numa_binding_to_current_process(device_index=device_index, numa_options=numa_options)
        return func(*args, **kwargs)

    return bound


def _maybe_apply_numa_binding_to_current_process(*, device_index: int, numa_options: NumaOptions | None) -> None:
    """
    Bind this process to the CPUs near accelerator *device_index*: each thread that has the CPUs of the present one.

    Threads that were bound before keep their CPUs. Raises `BindingError` (a ``RuntimeError``) when the binding is not
    possible, unless the options allow to fall back. Unlike torch's it works without ``numactl``.
    (torch: ``torch.numa.binding._maybe_apply_numa_binding_to_current_process``)
    """
    options = as_numa_options(numa_options)
    if options is not None:
        with binding_attempt(options):
            _bind_threads(_cpus(options, device_index))


@contextmanager
def binding_attempt(options: NumaOptions) -> Iterator[None]:
    """An error in the block becomes a `BindingError` or, where *options* allow it, ends the block with a warning."""
    try:
        yield
    except Exception as error:
        why = f"{options.affinity_mode.value}: {error}"
        if not options.should_fall_back_if_binding_fails:
            raise BindingError.of_setting("numa_options", f"{why}; or leave the binding out") from error
        _log.warning("numa_options=%s; nothing is bound to CPUs, as should_fall_back_if_binding_fails allows", why)


def _cpus(options: NumaOptions, device_index: int) -> frozenset[int]:
    topology = read_topology(_addresses())
    return cpus_for(options.affinity_mode, device_index, topology, frozenset(os.sched_getaffinity(0)))


def _bind_threads(cpus: frozenset[int]) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    seen: set[int] = set()
    # A thread that is not bound yet may start another one meanwhile: look until there is no new one.
    while new := {int(name) for name in os.listdir("/proc/self/task")} - seen:
        seen |= new
        for thread in new:
            try:
                if os.sched_getaffinity(thread) == before:
                    os.sched_setaffinity(thread, cpus)
            except ProcessLookupError:
                # The thread has ended.
                continue


def _addresses() -> tuple[str, ...]:
    """The GPUs as this process sees them, or would see them."""
    torch = sys.modules.get("torch")
    if torch is not None and _gpu_addresses.is_initialised(torch):
        return tuple(_gpu_addresses.gpu_addresses_here())
    relevant = ((name, value) for name, value in os.environ.items() if "VISIBLE" in name or "CUDA" in name)
    return _listed_by_program(frozenset(relevant))


@functools.cache
def _listed_by_program(environment: frozenset[tuple[str, str]]) -> tuple[str, ...]:
    """The GPUs that a program with the present variables sees; *environment* is what they depend on."""
    try:
        done = subprocess.run(
            [sys.executable, _gpu_addresses.__file__], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise BindingError(f"torch did not list the GPUs within {_TIMEOUT:g} s: check the driver") from None
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise BindingError(f"torch cannot list the GPUs: {words[-1] if words else done.returncode}")
    return tuple(loads(done.stdout.splitlines()[-1]))
