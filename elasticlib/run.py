"""
The command line ``elasticrun``: a `LaunchConfig` from options and ``PET_*`` variables, and its launch.

Rules of this file: `cli._parser` reads options, and `spec.py` checks the limits of values. An option
without effect causes a warning or an error. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

from elasticlib.cli import (
    PROG,
    ExitSettings,
    Parser,
    Request,
    by_source,
    exit_status,
    give_allocation_back,
    read_nodes,
    read_workers,
    report_end,
    request_of,
    subcommand,
)
from elasticlib.errors import (
    ChildFailedError,
    ConfigError,
    ElasticError,
    SignalException,
)
from elasticlib.spec import Entrypoint, LaunchConfig
from elasticlib.utils import LOG_LEVEL_VARIABLE, level_of
from elasticlib.workers import survive_notices

log = logging.getLogger("elasticlib.run")


def parse(args: Sequence[str], environ: Mapping[str, str]) -> Request:
    """
    Read a command line without the program's name; *environ* gives ``PET_*`` defaults.

    Raises `ConfigError` for a value that breaks a rule and SystemExit (status 2) for wrong usage.
    """
    return request_of(Parser(environ).parse_args(args), environ)


def launch(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Run the launch that a namespace of `parse_args` describes. Raises what `elastic_launch` raises."""
    request = request_of(args, environ, sys.stderr)
    if request.notice and sys.stderr is not None:
        sys.stderr.write(f"{PROG}: {request.notice}\n")

    # Imported late, so that help and errors of usage appear sooner.
    from elasticlib.launch import elastic_launch

    try:
        if request.progress:
            _launch_with_progress(request)
        elif sys.stderr is not None and sys.stderr.isatty():
            _launch_with_brief(request)
        else:
            elastic_launch(request.config, request.entrypoint)(*request.args)
    except ConfigError as e:
        raise by_source(e, request.given) from e
    except ElasticError as e:
        e._elastic_exit_status = exit_status(e, request.exits)
        if not report_end(e, request.exits, environ):
            give_allocation_back(e, request.exits, environ)
        raise


def _launch_with_progress(request: Request) -> None:
    from elasticlib.cli import BETWEEN_BLOCKS, progress_screen
    from elasticlib.job import Job
    from elasticlib.launch import CheckedLaunch

    with progress_screen() as shown:
        work = CheckedLaunch(request.config, request.entrypoint, request.args, None, {}, follows_callers=True)
        if work.console is not None:
            work.console.gather = BETWEEN_BLOCKS
        job = Job(work)
        with shown(job.status):
            job.run()


def _launch_with_brief(request: Request) -> None:
    from elasticlib.cli import Brief
    from elasticlib.job import Job
    from elasticlib.launch import CheckedLaunch

    work = CheckedLaunch(request.config, request.entrypoint, request.args, None, {})
    brief = Brief(PROG, work.title, sys.stderr)
    job = Job(work, listener=brief.sink)
    try:
        job.run()
    finally:
        brief.end(job.status())


# Functions for programs that build upon torch's module of this name.


def get_args_parser() -> argparse.ArgumentParser:
    """
    Return the parser of the command line; programs may add options to it.

    (torch: ``torch.distributed.run.get_args_parser``)
    """
    return Parser()


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """
    Parse a command line without the program's name, by default this program's own.

    Raises SystemExit (status 2) for wrong usage and `ConfigError` for a value that cannot be read. (torch:
    ``torch.distributed.run.parse_args``)
    """
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """
    Return the (least, most) number of nodes from ``N`` or ``MIN:MAX``.

    Raises `NodesError` for another form, `ConfigError` for a part that is not a number.
    (torch: ``torch.distributed.run.parse_min_max_nnodes``)
    """
    return read_nodes(nnodes)


def determine_local_world_size(nproc_per_node: str) -> int:
    """
    Return the number of workers that ``--nproc-per-node`` means on this machine.

    Raises `SpecError` (a ``ValueError``) for an unknown word, or if this machine has no such device.
    (torch: ``torch.distributed.run.determine_local_world_size``)
    """
    from elasticlib.workers import workers_per_node

    return workers_per_node(LaunchConfig(nproc_per_node=read_workers(nproc_per_node)).nproc_per_node)


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, Entrypoint, list[str]]:
    """
    Return (config, entry point, arguments) for ``elastic_launch(config, entry_point)(*arguments)``.

    torch's function of this name returns the interpreter as entry point, with ``-u`` and the script
    among the arguments. Here the script is the entry point, so that workers come from the fork
    server. Raises `ConfigError`.
    (torch: ``torch.distributed.run.config_from_args``)
    """
    from elasticlib.workers import workers_per_node

    no_rows = "only the command elasticrun can show it"
    request = request_of(args, os.environ, no_rows=no_rows)
    request.config.nproc_per_node = workers_per_node(request.config.nproc_per_node)
    return request.config, request.entrypoint, list(request.args)


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """
    Return the endpoint where the nodes meet, from a namespace of `parse_args`.

    (torch: ``torch.distributed.run.get_rdzv_endpoint``)
    """
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: argparse.Namespace) -> bool:
    """
    Return True if the script gets its local rank only in ``LOCAL_RANK``.

    This is False only for the default of the legacy command.

    (torch: ``torch.distributed.run.get_use_env``)
    """
    return bool(getattr(args, "use_env", True))


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a Python file as ``__main__`` in this interpreter. (torch: ``torch.distributed.run.run_script_path``)"""
    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def run(args: argparse.Namespace) -> None:
    """
    Run the launch that a namespace of `parse_args` describes, to its end.

    Raises what `elastic_launch` raises. (torch: ``torch.distributed.run.run``)
    """
    launch(args, os.environ)


@contextlib.contextmanager
def _console_log(level: str) -> Iterator[None]:
    """Write the library's log messages from *level* up to stderr within the block."""
    logger = logging.getLogger("elasticlib")
    before = logger.level
    logger.setLevel(level_of(level))
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname).1s %(asctime)s {PROG}[%(process)d] %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def main(args: Sequence[str] | None = None) -> None:
    """
    Run a command line to its end.

    Without *args* it runs the program's own command line. It then ends by SystemExit, with the
    reason on stderr:

    * 1 if workers failed, a signal stopped the job, or its nodes lost each other (``--failure-exit`` for failures
      of the program itself)
    * 75 if a signal stopped the job, and all workers returned after `should_stop` (``--preempt-exit``)
    * 2 if the call is wrong
    * 0 if the job succeeded without this node

    With *args* it raises what `elastic_launch` raises, and SystemExit only as argparse does.
    (torch: ``torch.distributed.run.main``)
    """
    command = subcommand(sys.argv[1:] if args is None else args)
    carry_out(command or (lambda: launch(parse_args(args), os.environ)), whole_program=args is None)


def carry_out(command: Callable[[], None], *, whole_program: bool) -> None:
    """
    Call *command* with the library's log messages on stderr.

    *whole_program*: if it raises, exit with the status that `main` documents.
    """
    # A machine may lack /dev/null: code that needs it fails with a message of its own.
    with contextlib.suppress(OSError):
        while whole_program and os.open(os.devnull, os.O_RDWR) < 3:
            # A standard stream was closed at our start: no other file may take its number.
            pass

    if whole_program:
        survive_notices()
    try:
        with _console_log(os.environ.get(LOG_LEVEL_VARIABLE) or "WARNING"):
            try:
                command()
            except ChildFailedError as e:
                # Its text and the worker's traceback are shown anyway.
                log.debug(
                    "the launch ended with an exception, raised at\n%s", "".join(traceback.format_tb(e.__traceback__))
                )
                raise
            except (ElasticError, KeyboardInterrupt):
                log.debug("the launch ended with an exception", exc_info=True)
                raise
    except ElasticError as e:
        if isinstance(e, ChildFailedError):
            from elasticlib.workers.child import write_error_file

            write_error_file(e)
        if not whole_program:
            raise
        _leave_by(e)
    except KeyboardInterrupt:
        if not whole_program:
            raise
        _leave(1, f"{PROG}: interrupted")


def _leave_by(error: ElasticError) -> None:
    status = error._elastic_exit_status
    if status is None:
        status = exit_status(error, ExitSettings())
    if isinstance(error, ChildFailedError):
        _leave(status, error.console_text())
    if isinstance(error, ConfigError):
        _leave(status, f"{PROG}: error: {error}")
    if isinstance(error, SignalException):
        # A second Ctrl-C must not interrupt the exit with a traceback.
        signal.signal(error.sigval, signal.SIG_IGN)

    _leave(status, f"{PROG}: {str(error) or 'interrupted'}")


def _leave(status: int, message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(message + "\n")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
