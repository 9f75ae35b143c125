"""
The kinds of end that a worker's function can have, and what its launcher must say of each.

``python -m tests.benchmarks.jobs.ends METHOD ROUNDS KIND...`` launches two workers for each kind and round, and prints
one JSON line with what went wrong.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch
from tests.process.scripts import strange_modules

WORKERS = 2
BIG = 32 << 20
VALUE = "the result"
kept: list[Any] = []
"""Objects that live until the worker's modules are cleared."""


@frozen
class Kind:
    """One kind of end."""

    run: Callable[[], Any]
    exitcode: int = 0
    result: Any = VALUE


def returns() -> str:
    return VALUE


def raises() -> None:
    raise ValueError("the reason")


def exits_well() -> None:
    sys.exit(0)


def exits_with_status() -> None:
    sys.exit(3)


def exits_with_text() -> None:
    sys.exit("the reason")


def leaves_at_once() -> None:
    os._exit(4)


def is_interrupted() -> None:
    raise KeyboardInterrupt


def is_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def leaves_a_daemon_thread() -> str:
    def work() -> None:
        while True:
            sum(range(1000))

    threading.Thread(target=work, daemon=True).start()
    return VALUE


def leaves_a_thread() -> str:
    threading.Timer(0.05, kept.append, [1]).start()
    return VALUE


def has_an_exit_handler() -> str:
    atexit.register(time.sleep, 0.01)
    return VALUE


def returns_much() -> bytes:
    return bytes(BIG)


def leaves_a_child() -> str:
    kept.append(subprocess.Popen(["sleep", "100"]))
    return VALUE


def leaves_a_process_pool() -> str:
    kept.append(multiprocessing.get_context("fork").Pool(2))
    kept[-1].map(abs, [-1, -2])
    return VALUE


def leaves_a_file_open() -> str:
    kept.append(tempfile.TemporaryFile("w"))
    kept[-1].write("text")
    return VALUE


def fills_the_modules() -> str:
    with tempfile.TemporaryDirectory() as folder:
        strange_modules.fill(folder)
    return VALUE


def _group() -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    return dist


def leaves_a_group_open() -> str:
    _group()
    return VALUE


def raises_with_a_group_open() -> None:
    _group()
    raise ValueError("the reason")


def destroys_its_group() -> str:
    _group().destroy_process_group()
    return VALUE


def keeps_a_destroyed_group() -> str:
    dist = _group()
    kept.append(dist.group.WORLD)
    dist.destroy_process_group()
    return VALUE


def leaves_a_subgroup() -> str:
    import torch

    dist = _group()
    kept.append(dist.new_group([0, 1]))
    kept.append(dist.all_reduce(torch.ones(3), group=kept[0], async_op=True))
    kept[-1].wait()
    return VALUE


def _trained(steps: int) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model


def holds_a_model_in_its_locals() -> str:
    dist = _group()
    model = _trained(3)
    dist.destroy_process_group()
    assert model is not None
    return VALUE


def holds_a_model_in_a_global() -> str:
    _group()
    kept.append(_trained(3))
    return VALUE


def leaves_a_loader() -> str:
    import torch
    from torch.utils.data import DataLoader

    data: Any = list(torch.arange(64.0).split(1))
    kept.append(iter(DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)))
    next(kept[-1])
    return VALUE


def computes_in_a_daemon_thread() -> str:
    import torch

    def work() -> None:
        while True:
            weight = torch.ones(8, 8, requires_grad=True)
            (weight @ weight).sum().backward()

    threading.Thread(target=work, daemon=True).start()
    return VALUE


def computes_compiled() -> str:
    import torch

    compiled = torch.compile(lambda x: x * 2 + 1, backend="aot_eager")
    kept.append(compiled)
    compiled(torch.ones(3))
    return VALUE


FAILING = {
    raises: 1,
    raises_with_a_group_open: 1,
    exits_with_status: 3,
    exits_with_text: 1,
    leaves_at_once: 4,
    is_interrupted: 130,
    is_terminated: -15,
}
RESULTS: dict[Callable[[], Any], Any] = {exits_well: None, returns_much: bytes(BIG)}
WELL: tuple[Callable[[], Any], ...] = (
    returns,
    exits_well,
    leaves_a_daemon_thread,
    leaves_a_thread,
    has_an_exit_handler,
    returns_much,
    leaves_a_child,
    leaves_a_process_pool,
    leaves_a_file_open,
    fills_the_modules,
    leaves_a_group_open,
    destroys_its_group,
    keeps_a_destroyed_group,
    leaves_a_subgroup,
    holds_a_model_in_its_locals,
    holds_a_model_in_a_global,
    leaves_a_loader,
    computes_in_a_daemon_thread,
    computes_compiled,
)
KINDS = {run.__name__: Kind(run, exitcode) for run, exitcode in FAILING.items()} | {
    run.__name__: Kind(run, result=RESULTS.get(run, VALUE)) for run in WELL
}


def complaint(kind: Kind, method: str) -> str:
    """Launch it once; what the launcher said that was wrong, empty where nothing was."""
    config = LaunchConfig(nproc_per_node=WORKERS, max_restarts=0, start_method=method)  # type: ignore[arg-type]
    try:
        results = elastic_launch(config, kind.run)()
    except ChildFailedError as error:
        found = {failure.exitcode for failure in error.failures.values()}
        return "" if found == {kind.exitcode} else f"exit codes {sorted(found)}: {error}"
    if kind.exitcode:
        return "it counted as a success"
    return "" if results == dict.fromkeys(range(WORKERS), kind.result) else "its results are others"


def complaints(method: str, rounds: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """The name of each kind that went wrong, and how."""
    for name in names:
        for _ in range(rounds):
            if text := complaint(KINDS[name], method):
                yield name, text


if __name__ == "__main__":
    print(json.dumps(list(complaints(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))))
