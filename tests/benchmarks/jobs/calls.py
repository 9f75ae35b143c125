"""
A program that calls a library's `elastic_launch` again and again, and writes down how long each call took.

Usage: ``python -m tests.benchmarks.jobs.calls LAUNCHER START_METHOD WORKERS CALLS PAUSE FUNCTION``; one line per call:
seconds to the moment that its last worker returned, seconds to the call's return. FUNCTION names a module beside this
one, and a function in it; PAUSE are seconds between two calls, in which a user reads what the first has shown.
"""

import importlib
import sys
import time

import torch  # noqa: F401  (a program that launches training has it)


def main() -> None:
    """Make the calls that the command line asks for."""
    from tests.benchmarks.launchers import LAUNCHERS  # workers import the program, and need none of it

    launcher = LAUNCHERS[sys.argv[1]]
    workers, calls, pause = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    function = getattr(importlib.import_module(f"tests.benchmarks.jobs.{sys.argv[6]}"), sys.argv[6])
    library = importlib.import_module(launcher.interface)
    config = library.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        start_method=sys.argv[2],
        max_restarts=0,
        **launcher.settings,
    )
    for number in range(calls):
        time.sleep(pause if number else 0)
        before = time.monotonic()
        results = library.elastic_launch(config, function)()
        after = time.monotonic()
        if sorted(results) != list(range(workers)):
            raise SystemExit(f"{workers} workers were asked for, results came from ranks {sorted(results)}")
        print(max(results.values()) - before, after - before, flush=True)


if __name__ == "__main__":
    main()
