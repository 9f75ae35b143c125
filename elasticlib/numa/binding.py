"""
Binding of a command, or of this process, to the CPUs near a GPU, without a launch.

The names are those of ``torch.numa.binding``. torch's launcher binds with the functions that have
an underscore; they are for programs that start workers themselves. Launches of this library need no
``numactl``, because their workers bind themselves before they become the user's program.

Rules of this file: a process that has not used a device does not use one here. An error is raised,
or, if the options allow it, logged; then nothing is bound.
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
"""Timeout in seconds of the program that lists the devices: it imports torch."""


def _maybe_wrap_command_args_with_numa_binding(
    command_args: tuple[str, ...], *, device_index: int, numa_options: NumaOptions | None
) -> tuple[str, ...]:
    """
    Return *command_args* with ``numactl`` in front, for the CPUs near accelerator *device_index*.

    Without options they are unchanged. Raises `BindingError` (a ``RuntimeError``) if ``numactl`` is
    not on PATH or the binding is not possible. If the options allow to fall back, the arguments are
    then unchanged, with a warning.
    (torch: ``torch.numa.binding._maybe_wrap_command_args_with_numa_binding``)
    """
    options = as_numa_options(numa_options)
    command = tuple(command_args)
    if options is not None:
        with binding_attempt(options):
            if shutil.which("numactl") is None:
                raise BindingError("numactl, which binds commands to CPUs, is not on PATH: install numactl")
            command = ("numactl", f"--physcpubind={ranges(_cpus(options, device_index))}", *command)
    return command


def _maybe_wrap_with_numa_binding(
    func: Callable[P, R], *, device_index: int, numa_options: NumaOptions | None
) -> Callable[P, R]:
    """
    Return *func*, wrapped to bind its process before it runs; unchanged without options.

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
    Bind this process to the CPUs near accelerator *device_index*.

    It binds each thread that has the same CPUs as the current one. Threads that were bound before
    keep their CPUs. Raises `BindingError` (a ``RuntimeError``) if the binding is not possible,
    unless the options allow to fall back. Unlike torch's function it works without ``numactl``.
    (torch: ``torch.numa.binding._maybe_apply_numa_binding_to_current_process``)
    """
    options = as_numa_options(numa_options)
    if options is not None:
        with binding_attempt(options):
            _bind_threads(_cpus(options, device_index))


@contextmanager
def binding_attempt(options: NumaOptions) -> Iterator[None]:
    """Turn an error in the block into a `BindingError`, or into a warning if *options* allow it."""
    try:
        yield
    # Of any class: with the fallback, even an unforeseen error must not keep workers from starting.
    except Exception as error:
        why = f"{options.affinity_mode.value}: {error}"
        if not options.should_fall_back_if_binding_fails:
            raise BindingError.of_setting(
                "numa_options", f"{why}; without this option, workers start unbound"
            ) from error
        _log.warning(
            "numa_options=%s; workers start without CPU binding, because should_fall_back_if_binding_fails is set", why
        )


def _cpus(options: NumaOptions, device_index: int) -> frozenset[int]:
    topology = read_topology(_addresses())
    return cpus_for(options.affinity_mode, device_index, topology, frozenset(os.sched_getaffinity(0)))


def _bind_threads(cpus: frozenset[int]) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    seen: set[int] = set()

    # A thread that is not bound yet may start another one meanwhile: repeat until there is no new
    # one.
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
    """Return the addresses of the GPUs that this process sees, without initialising them here."""
    torch = sys.modules.get("torch")
    if torch is not None and _gpu_addresses.is_initialised(torch):
        return tuple(_gpu_addresses.gpu_addresses_here())
    # The GPUs that a program sees depend on CUDA_VISIBLE_DEVICES and its kin.
    relevant = ((name, value) for name, value in os.environ.items() if "VISIBLE" in name or "CUDA" in name)
    return _listed_by_program(frozenset(relevant))


@functools.cache
def _listed_by_program(environment: frozenset[tuple[str, str]]) -> tuple[str, ...]:
    """Return the GPUs that a new program sees; *environment* has the variables that matter."""
    try:
        done = subprocess.run(
            [sys.executable, _gpu_addresses.__file__], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise BindingError(f"torch did not list the GPUs within {_TIMEOUT:g} s: check the driver") from None

    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise BindingError(f"torch cannot list the GPUs: {words[-1] if words else done.returncode}")

    # A driver may have printed lines before the result.
    return tuple(loads(done.stdout.splitlines()[-1]))
