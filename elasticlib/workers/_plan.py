"""
The plan of a launch: what the workers need, made from an entry point, and the check of the call
before a start.

`plan` distinguishes a function, a Python script, folder or archive, a module and any other
program. It refuses calls that cannot work, and collects the state that a worker must find:
environment, folder, search path, limits.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pkgutil
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import MappingProxyType
from typing import Any

from attrs import evolve, field, frozen

from elasticlib import _rules
from elasticlib.errors import ConfigError, EntrypointError
from elasticlib.numa import binding_attempt, cpus_for, read_topology
from elasticlib.preload import EDITS, ForkServerKey, choose_preload, depends_on_path, import_path
from elasticlib.processes import (
    Surroundings,
    absolute_path,
    check_system,
    current_folder,
    debugger_follows,
    flags_here,
    folder_of_script,
    followed_by_debugger,
    fresh_command,
    identity_of_current_folder,
    importable_by,
    name_of_current_folder,
    path_of_current_folder,
)
from elasticlib.spec import DEFAULT_PRELOAD, START_METHODS, LaunchConfig, StartMethod, WorkerSpec
from elasticlib.stacks import ranks_text
from elasticlib.workers import _devices, _environment, _machine, _packing, _signals
from elasticlib.workers.child import _exiting
from elasticlib.workers.child._buffers import Memory
from elasticlib.workers.child._start_spec import STDIN, StartSpec
from elasticlib.workers.child.program import _main

_log = logging.getLogger("elasticlib")
_LOCAL_RANK = re.compile(r"\$\{local_rank\}|\$local_rank\b")
_MODULE = re.compile(r"[^/.]+(\.[^/.]+)*")
"""Names that `python -m` finds, including those that no import statement can hold."""
_LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_CACHED = type(functools.lru_cache(abs))
_UNBUFFERED_VARIABLE = "PYTHONUNBUFFERED"
_OPENMP_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# Python always ignores the first two, and a shell ignores the others for its background jobs.
_INHERITED = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT}


@frozen
class LaunchPlan:
    """The plan that all rounds of a launch share."""

    common: StartSpec
    """The part of the `StartSpec` that all workers share."""
    args: tuple[str, ...]
    """Command line after the program's name; ``${local_rank}`` is replaced for each worker."""
    memories: Mapping[str, bytes | Memory]
    """Memories that all workers get, by name."""
    fork_server: ForkServerKey | None
    """None if the caller itself is forked."""
    search_path: tuple[str, ...]
    """Folders in which the fork server finds the modules to preload."""
    function: str = ""
    """Full name of the function; empty for programs."""
    call: Callable[..., Any] | None = None
    variables: Sequence[Mapping[str, str]] = ()
    """By local rank, variables that override a worker's usual ones."""
    affinities: Sequence[frozenset[int]] = ()
    """
    By local rank, the CPUs that a worker is bound to; empty leaves all workers on the launcher's.
    """
    descriptors: Mapping[str, int] = field(factory=dict)
    """
    Files that all workers get, by name, beside the memories; they stay open while a worker can be
    started.
    """

    def environment_of(self, local_rank: int, usual: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of the worker *local_rank*; *usual* are those without this plan."""
        return {**usual, **(self.variables[local_rank] if self.variables else {})}

    def spec(self, local_rank: int, usual: Mapping[str, str]) -> StartSpec:
        """
        Return the `StartSpec` of the worker *local_rank*; *usual* are its variables without this
        plan.
        """
        variables = self.environment_of(local_rank, usual)
        found = replace(self.common, local_rank=local_rank, argv=self.argv(local_rank), variables=variables)
        return replace(found, affinity=sorted(self.affinities[local_rank]), bound=True) if self.affinities else found

    def argv(self, local_rank: int) -> list[str]:
        """Return the command line of the worker *local_rank*."""
        argv = [*self.common.argv, *(_LOCAL_RANK.sub(str(local_rank), arg) for arg in self.args)]
        return followed_by_debugger(argv) if self.common.kind == "program" else argv


@frozen
class Preparation:
    """Result of `prepare_workers`."""

    caller: Mapping[str, str]
    """The environment of this process, for the workers."""
    cpus: float
    signals_to_handle: str
    """Signals that can be handled here; the workers' environment names all requested ones."""
    job: LaunchPlan


def prepare_workers(
    spec: WorkerSpec,
    start_method: StartMethod,
    signals_to_handle: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Preparation:
    """
    Return everything that the workers of *spec* need; its rendezvous is not used, and may be
    opened later.

    *variables* override those of this process.

    Raises `ConfigError` and its kinds for an invalid entry point, arguments, start method,
    signals, devices or CPUs.
    """
    _rules.check_choice("start_method", start_method, START_METHODS)

    # A script without a guard would start workers that import it, which would start workers ...
    if _main.is_importing():
        raise ConfigError(
            "this script starts workers while a worker imports it: put the call under `if __name__ == '__main__':`, "
            "or set LaunchConfig(main='value')"
        )

    handled = ",".join(signum.name for signum in _signals.parse_signals(signals_to_handle))
    caller = {**os.environ, **variables}
    cpus = _machine.cpu_count()
    threads = _environment.threads_per_worker(caller, cpus, spec.local_world_size)
    environment = _environment.common_variables(caller, threads, signals_to_handle)
    return Preparation(caller, cpus, handled, plan(spec, start_method, environment, threads))


def plan(spec: WorkerSpec, start_method: str, environment: Mapping[str, str], threads: int) -> LaunchPlan:
    """
    Return the job of *spec* in *environment*.

    It starts no worker, and at most a fork server, to list the GPUs. *threads*: the number of
    threads of each worker. Raises `EntrypointError`, `PicklingError` or another `ConfigError`,
    and `StartError` on a machine that cannot start processes.
    """
    check_system()
    variables: Sequence[Mapping[str, str]] = ()
    if spec.virtual_local_rank:
        variables = _environment.alone_with_a_device(environment, spec.local_world_size)
        _warn_without_device(variables)

    job = _work(spec, start_method, environment, threads)
    job = evolve(job, variables=variables, affinities=_affinities(spec, job))
    preload = job.fork_server.preload if job.fork_server is not None else ()
    if job.affinities and preload and _openmp_binds(environment):
        # Loaded ahead, OpenMP would bind the workers' threads to places among the fork server's
        # CPUs.
        _log.warning(
            "numa_options=%s: OpenMP binds threads too, because of OMP_PROC_BIND, OMP_PLACES or the like; so that the "
            "bindings agree, each worker imports %s itself, which makes starts slower",
            spec.numa_options.affinity_mode.value if spec.numa_options else None,
            ", ".join(preload),
        )
        job = without_preload(job)

    return job


def _warn_without_device(variables: Sequence[Mapping[str, str]]) -> None:
    bare = [rank for rank, own in enumerate(variables) if not own[_environment.CUDA_DEVICES_VARIABLE]]
    if bare:
        _log.warning(
            "virtual_local_rank=True: CUDA_VISIBLE_DEVICES (or HIP_VISIBLE_DEVICES) lists no device for %s",
            ranks_text(bare, "local rank"),
        )


def _openmp_binds(environment: Mapping[str, str]) -> bool:
    """
    Return True if OpenMP will bind each thread to a place, which it chooses when it is loaded.
    """
    if environment.get("OMP_PROC_BIND", "").strip().lower() == "false":
        return False
    return any(environment.get(name) for name in _OPENMP_PLACES)


def _work(spec: WorkerSpec, start_method: str, environment: Mapping[str, str], threads: int) -> LaunchPlan:
    entry = spec.entrypoint
    limit = _exiting.DEFAULT_EXIT_TIMEOUT if spec.exit_timeout is None else spec.exit_timeout
    common = StartSpec(
        env=dict(environment),
        cwd=path_of_current_folder(),
        place=identity_of_current_folder(),
        surroundings=Surroundings.now().plain(),
        affinity=sorted(os.sched_getaffinity(0)),
        threads=threads,
        ignored=[signum for signum in _INHERITED if signal.getsignal(signum) == signal.SIG_IGN],
        fresh=start_method == "spawn",
        python=fresh_command(sys.executable),
        exit_timeout=(limit, spec.exit_timeout is not None),
        unbuffered=_is_unbuffered(environment),
    )
    job = LaunchPlan(common, (), {}, None, ())
    check_call(entry, spec.args, spec.kwargs, spec, start_method)
    if isinstance(entry, (str, os.PathLike)):
        return _command(job, spec, os.fspath(entry), start_method)
    assert callable(entry)
    return _function(job, spec, entry, start_method)


def check_call(
    entry: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: WorkerSpec | LaunchConfig,
    start_method: str,
) -> None:
    """Raise `EntrypointError` or another `ConfigError` for a call that no machine could run."""
    if isinstance(entry, (str, os.PathLike)):
        _check_command(os.fspath(entry), tuple(map(str, args)), kwargs)
        if settings.module and not _MODULE.fullmatch(os.fspath(entry)):
            raise EntrypointError(f"module {entry!r} is not a dotted name such as pkg.mod (without .py)")
        return

    if not callable(entry):
        kind = type(entry).__qualname__
        raise EntrypointError(
            f"entrypoint={entry!r}, a {kind}, is not a callable, script path, module or program: give one of these"
        )
    if settings.module or settings.no_python:
        raise EntrypointError(f"module and no_python cannot be used with a callable ({entry!r}): leave them out")
    check_function(entry)
    if start_method != "forkserver":
        _refuse_preload(settings)


def _is_unbuffered(environment: Mapping[str, str]) -> bool:
    """
    Return True if Python programs in *environment* do not buffer their streams, or this program
    does not (``python -u``).
    """
    if environment.get(_UNBUFFERED_VARIABLE) and not sys.flags.ignore_environment:
        return True
    return bool(getattr(sys.__stdout__, "write_through", False))


def _affinities(spec: WorkerSpec, job: LaunchPlan) -> list[frozenset[int]]:
    """Return the CPUs of each worker by its real local rank; empty without a binding."""
    options = spec.numa_options
    found: list[frozenset[int]] = []
    if options is None:
        return found
    with binding_attempt(options):
        topology = read_topology(_devices.gpu_addresses(job.fork_server, job.common.env, job.search_path))
        allowed = frozenset(job.common.affinity)
        found = [cpus_for(options.affinity_mode, rank, topology, allowed) for rank in range(spec.local_world_size)]
    return found


def _function(job: LaunchPlan, spec: WorkerSpec, entry: Callable[..., Any], start_method: str) -> LaunchPlan:
    args, kwargs = spec.args, spec.kwargs
    target = check_function(entry)
    job = _with_common(job, kind="function", sys_path=import_path(), argv=list(sys.argv))
    # Nothing is pickled: a forked worker has a copy of this program.
    if start_method == "fork":
        return evolve(job, call=functools.partial(entry, *args, **kwargs))

    packed = _packing.pack_call(entry, args, kwargs, spec.main)
    EDITS.warn()

    # Workers get the options of this interpreter, like those of multiprocessing.
    flags = flags_here()
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    shared = None if packed.names is None else sorted(packed.names)
    python = fresh_command(sys.executable, flags)
    job = _with_common(job, python=python, sources=packed.sources, main_file=main_file, shared=shared)
    job = evolve(job, function=f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target))}")
    return _from_fork_server(
        evolve(job, memories=packed.memories(), search_path=tuple(import_path())),
        spec,
        start_method,
        flags=flags,
        function=target,
    )


def check_function(entry: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return the function that a call of *entry* runs, without its bound arguments.

    Raises `EntrypointError` if the call would run nothing.
    """
    target: Any = entry
    while isinstance(target, (functools.partial, _CACHED)):
        target = target.func if isinstance(target, functools.partial) else target.__wrapped__
    if any(kind(each) for kind in _LAZY for each in (target, type(target).__call__)):
        raise EntrypointError(
            f"{entry!r} only creates a coroutine or generator when it is called: give a function that runs "
            "it, such as one that calls asyncio.run(...)"
        )
    return target  # type: ignore[no-any-return]


def _command(job: LaunchPlan, spec: WorkerSpec, entry: str, start_method: str) -> LaunchPlan:
    """Return the job of a script, a module or a program."""
    if start_method == "fork":
        _log.info("start_method='fork' works only for functions: %s is started with 'forkserver' instead", entry)
        start_method = "forkserver"

    args = tuple(str(arg) for arg in spec.args)
    job = evolve(job, args=args)
    if spec.module:
        return _module(job, spec, entry, start_method)
    if not _is_script(spec, entry):
        return _any_program(job, spec, entry)

    # A file whose name holds exactly that text is a script like others.
    if _LOCAL_RANK.search(entry) and not os.path.lexists(entry):
        return _script_by_rank(job, spec, entry)

    job, text = _script(job, entry)
    return _by_interpreter(job, spec, ["-u", entry], start_method, text)


def _check_command(entry: str, args: tuple[str, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `EntrypointError` for arguments that no command line can hold."""
    for word in (entry, *args):
        if "\0" in word:
            raise EntrypointError(
                f"{word!r} contains a NUL character, which a command line cannot contain: leave it out"
            )
    if kwargs:
        raise EntrypointError(
            f"{entry!r} is a command, which accepts no keyword arguments ({', '.join(kwargs)}): "
            "pass strings, such as '--name=value'"
        )


def _interpreter(environment: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the Python that runs scripts in *environment*, and its flags."""
    python = environment.get("PYTHON_EXEC") or sys.executable
    python = shutil.which(python, path=environment.get("PATH", os.defpath)) or python
    # Another version may not know the options of this one.
    flags = flags_here() if python == sys.executable else ()
    return python, flags


def _module(job: LaunchPlan, spec: WorkerSpec, entry: str, start_method: str) -> LaunchPlan:
    job = _with_common(job, kind="module", entry=entry, argv=["-m"], path0=job.common.cwd)
    return _by_interpreter(job, spec, ["-u", "-m", entry], start_method)


def _script_by_rank(job: LaunchPlan, spec: WorkerSpec, entry: str) -> LaunchPlan:
    """
    Return the job in which each worker has a script of its own, which its own interpreter finds.
    """
    python, flags = _interpreter(job.common.env)
    job = _with_common(job, kind="program", argv=[python, *flags, "-u"], fresh=False)
    return _from_fork_server(evolve(job, args=(entry, *job.args)), spec, "spawn")


def _is_script(spec: WorkerSpec, entry: str) -> bool:
    """Return True for a script that Python runs, not the system."""
    if spec.no_python:
        return False
    return isinstance(spec.entrypoint, os.PathLike) or entry.endswith((".py", ".pyc"))


def _any_program(job: LaunchPlan, spec: WorkerSpec, entry: str) -> LaunchPlan:
    program = _program(entry, job.common.env)
    _refuse_preload(spec)
    job = _with_common(job, signals_group=True, kind="program", argv=[program], fresh=False)
    return _from_fork_server(job, spec, "spawn")


def _by_interpreter(
    job: LaunchPlan, spec: WorkerSpec, command: list[str], start_method: str, text: bytes | None = None
) -> LaunchPlan:
    """
    Return the job of a Python program, which *command* runs; *text* is the content of a script
    from a pipe.
    """
    if start_method == "spawn":
        _refuse_preload(spec)
    environment = job.common.env
    python, flags = _interpreter(environment)
    if python == sys.executable or importable_by(python, environment):
        job = _with_common(job, python=fresh_command(python, flags))
        path = (job.common.path0,) if depends_on_path(spec.preload) else ()
        return _from_fork_server(evolve(job, search_path=path), spec, start_method, python, flags, text=text)

    if text is not None:
        raise EntrypointError(
            f"script {command[-1]!r} is a pipe, which works only if PYTHON_EXEC can import elasticlib, and "
            f"PYTHON_EXEC={python!r} cannot: give a file"
        )

    warnings.warn(
        f"PYTHON_EXEC={python!r} cannot import elasticlib: each worker imports everything itself, and "
        "reports contain no traceback unless the script uses @record",
        stacklevel=2,
    )
    job = _with_common(job, kind="program", argv=[python, *flags, *command], fresh=False)
    return _from_fork_server(job, spec, "spawn")


def _script(job: LaunchPlan, entry: str) -> tuple[LaunchPlan, bytes | None]:
    """
    Return *job* with the script, folder or archive *entry*, and the text of a script that workers
    cannot read.
    """
    _check_folder_of(entry)
    if _can_be_read_once(entry):
        text = _read_once(entry)
        path0 = "" if entry == STDIN else folder_of_script(entry)
        return evolve(_with_common(job, kind="script", argv=[entry], path0=path0), memories={"script": text}), text
    _check_script(entry)
    path = absolute_path(entry)
    if _is_package(path, entry):
        return _with_common(job, kind="package", argv=[entry], path0=path), None
    return _with_common(job, kind="script", argv=[entry], path0=folder_of_script(entry)), None


def _with_common(job: LaunchPlan, **changes: Any) -> LaunchPlan:
    """Return *job* with more settings for all its workers."""
    return evolve(job, common=replace(job.common, **changes))


def shown_by_caller(job: LaunchPlan, *, errors: bool, display_key: str, ranks: Sequence[int] | None) -> LaunchPlan:
    """
    Return *job* for a notebook, which shows exceptions unless *errors*.

    It shows the displayed objects of *ranks*.
    """
    return _with_common(job, shows_errors=not errors, displays=display_key, displays_of=ranks)


def without_keyboard(job: LaunchPlan) -> LaunchPlan:
    """Return *job* with workers whose functions cannot ask a person, since their machine is not the caller's."""
    return _with_common(job, has_keyboard=False)


def serving_caller(job: LaunchPlan) -> LaunchPlan:
    """
    Return *job* for a pool, a test or a cell: it leaves no process of its workers, not even a
    detached one.
    """
    return _with_common(job, serves_caller=True)


def ignoring(job: LaunchPlan, signums: Iterable[int]) -> LaunchPlan:
    """Return *job* with workers that ignore *signums* until their program handles them, and so do its children."""
    return evolve(job, common=replace(job.common, ignored=sorted({*job.common.ignored, *signums})))


def with_descriptors(job: LaunchPlan, descriptors: Mapping[str, int]) -> LaunchPlan:
    """Return *job* with workers that also get these *descriptors*, by name."""
    return evolve(job, descriptors={**job.descriptors, **descriptors})


def without_preload(job: LaunchPlan) -> LaunchPlan:
    """Return *job* with a fork server that imports nothing ahead."""
    assert job.fork_server is not None
    return evolve(job, fork_server=evolve(job.fork_server, preload=(), path=()), search_path=())


def _from_fork_server(
    job: LaunchPlan,
    spec: WorkerSpec,
    start_method: str,
    python: str = sys.executable,
    flags: tuple[str, ...] = (),
    function: Callable[..., Any] | None = None,
    text: bytes | None = None,
) -> LaunchPlan:
    if debugger_follows() and job.common.kind != "program":
        _log.log(
            logging.WARNING if _is_preload_chosen(spec) else logging.INFO,
            "a debugger follows this program: each worker is a new interpreter, in which it stops at "
            "breakpoints; preload=%r is ignored",
            ",".join(spec.preload),
        )
        job = _with_common(job, fresh=True, python=followed_by_debugger(job.common.python))
        start_method = "spawn"

    # Each worker becomes a new interpreter, so the fork server imports nothing.
    if start_method == "spawn":
        return evolve(job, fork_server=ForkServerKey(sys.executable, flags=flags), search_path=())

    path = job.search_path if depends_on_path(spec.preload) else ()
    key = ForkServerKey.of(python, spec.preload, path, flags)
    if key.is_automatic:
        chosen = choose_preload(job.common, function, text)
        key = evolve(key, preload=chosen.modules)
        job = _with_common(job, threads=chosen.threads or job.common.threads)

    return evolve(job, fork_server=key)


def _is_preload_chosen(spec: WorkerSpec | LaunchConfig) -> bool:
    """Return True if the user named modules to import ahead."""
    return spec.preload not in (DEFAULT_PRELOAD, ())


def _refuse_preload(spec: WorkerSpec | LaunchConfig) -> None:
    if _is_preload_chosen(spec):
        raise ConfigError.of_setting(
            "preload",
            f"{','.join(spec.preload)!r}: modules can be preloaded only for Python workers with "
            "start_method='forkserver': leave preload out",
        )


def _can_be_read_once(path: str) -> bool:
    """
    Return True for a script whose text comes through a pipe that this program holds.

    Workers get the text that this program has read.
    """
    if path == STDIN:
        return True
    # /dev/stdin, /dev/fd/63. A pipe on a disk may never get a writer.
    return os.path.exists(path) and os.path.realpath(path).startswith("/proc/") and not os.path.isfile(path)


def _read_once(path: str) -> bytes:
    """Read the text of a script to its end. Raises `EntrypointError` if it cannot be read."""
    try:
        with open(0 if path == STDIN else path, "rb", closefd=path != STDIN) as file:
            return file.read()
    except OSError as error:
        raise EntrypointError(f"script {path!r} cannot be read: {error.strerror}; give a file") from error


def _check_folder_of(path: str) -> None:
    """Raise `EntrypointError` for a relative path such as ``../train.py`` from a folder that was removed."""
    # The kernel follows such a path, but Python cannot make it absolute.
    if path != STDIN and not os.path.isabs(path) and os.path.lexists(path):
        current_folder()


def _check_script(path: str) -> None:
    """Raise `EntrypointError` for a script that cannot be read."""
    if not os.path.lexists(path):
        raise EntrypointError(f"script {path!r} was not found in {name_of_current_folder()}: check the path")
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise EntrypointError(f"script {path!r} is not a file")
    if not os.access(path, os.R_OK):
        raise EntrypointError(f"script {path!r} cannot be read by this user: change its permissions")


def _is_package(path: str, typed: str) -> bool:
    """
    Return True if Python runs the ``__main__`` in *path*: a folder or an archive.

    Raises `EntrypointError` if that has none.
    """
    importer: Any = pkgutil.get_importer(path)
    if importer is None:
        return False
    # An earlier launch of this program may have looked into it, before it changed.
    importer.invalidate_caches()
    if not _is_plain_module(importer.find_spec("__main__")):
        kind = "a folder" if os.path.isdir(path) else "an archive"
        raise EntrypointError(f"script {typed!r} is {kind} without a __main__.py: give a script, or add a __main__.py")
    return True


def _is_plain_module(found: ModuleSpec | None) -> bool:
    """Return True for a module that has a loader and is not a package."""
    return found is not None and found.loader is not None and found.submodule_search_locations is None


def _program(name: str, environment: Mapping[str, str]) -> str:
    if not name:
        raise EntrypointError("the entry point is empty: give a script, a program or a callable")

    found = shutil.which(name, path=environment.get("PATH", os.defpath))
    if found is not None:
        return found

    # It is a path, so PATH is not searched.
    if os.path.dirname(name):
        if not os.path.lexists(name):
            raise EntrypointError(f"program {name!r} was not found in {name_of_current_folder()}: check the path")
        if not os.path.isfile(name):
            raise EntrypointError(f"program {name!r} is not a file")
        raise EntrypointError(f"program {name!r} cannot be executed: change its permissions (chmod +x)")

    if os.path.isdir(name):
        raise EntrypointError(f"{name!r} is a folder: give a script or a program")

    near = f"; did you mean {name}.py?" if os.path.isfile(f"{name}.py") else ""
    raise EntrypointError(
        f"program {name!r} was not found on PATH (a path needs a slash; a Python script ends in .py or is a Path){near}"
    )
