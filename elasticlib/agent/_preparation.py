"""
What a local agent needs that no rendezvous has a say in: made before one is opened, it is the check of the call.

Rules of this file: it starts no worker, and at most the fork server, to ask it for the GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from attrs import frozen

from elasticlib import _rules
from elasticlib.spec import START_METHODS, StartMethod, WorkerSpec
from elasticlib.workers import _environment, _machine, _plan, _signals


@frozen
class Preparation:
    """What `prepare` found."""

    caller: Mapping[str, str]
    """The environment of this process."""
    cpus: float
    signals_to_handle: str
    """Those that can be handled here; the workers' environment names all that were asked for."""
    job: _plan.Job


def prepare(spec: WorkerSpec, start_method: StartMethod, signals_to_handle: str) -> Preparation:
    """
    All that the workers of *spec* need; its rendezvous is not looked at.

    Raises `ConfigError` and its kinds for an entry point, arguments, a start method, signals, devices or CPUs that
    cannot be.
    """
    _rules.check_choice("start_method", start_method, START_METHODS)
    handled = ",".join(signum.name for signum in _signals.parse(signals_to_handle))
    caller = dict(os.environ)
    cpus = _machine.cpus()
    threads = _environment.threads_per_worker(caller, cpus, spec.local_world_size)
    environment = _environment.common_variables(caller, threads, signals_to_handle)
    return Preparation(caller, cpus, handled, _plan.plan(spec, start_method, environment, threads))
