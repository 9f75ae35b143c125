"""Sharing of multiprocessing objects with workers, as in torch's spawn: no descriptor as a number."""

from __future__ import annotations

import multiprocessing as mp
import os
import selectors
import socket
import threading
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, elastic_launch, pool
from elasticlib.errors import PicklingError
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

LIMIT = 60.0
METHODS = ("forkserver", "spawn", "fork")


def settings(workers: int = 2, **more: Any) -> LaunchConfig:
    return LaunchConfig(nproc_per_node=workers, **{"max_restarts": 0, "preload": (), **more})


def use_all(
    queue: Any,
    simple: Any,
    event: Any,
    lock: Any,
    value: Any,
    barrier: Any,
    array: Any,
    ends: Any,
    mapping: Any,
    name: str,
) -> str:
    rank = int(os.environ["RANK"])
    queue.put(rank)
    simple.put(rank)
    assert event.wait(LIMIT)
    with lock:
        value.value += 1
    barrier.wait(LIMIT)
    array[rank] = 9
    ends[rank].send(rank)
    mapping[rank] = bytes(mp.current_process().authkey)
    memory = shared_memory.SharedMemory(name=name)
    memory.buf[rank] = 7
    memory.close()
    return "used"


@pytest.mark.parametrize("method", METHODS)
def test_objects_that_multiprocessing_can_share_are_shared(method: str) -> None:
    context = mp.get_context(method if method != "forkserver" else "spawn")
    queue, simple, event, lock = context.Queue(), context.SimpleQueue(), context.Event(), context.Lock()
    value, barrier, array = context.Value("i", 0), context.Barrier(2), context.Array("i", 2)
    readers, writers = zip(*(context.Pipe(duplex=False) for _ in range(2)), strict=True)
    event.set()
    memory = shared_memory.SharedMemory(create=True, size=8)
    try:
        with context.Manager() as manager:
            mapping = manager.dict()
            shared = (queue, simple, event, lock, value, barrier, array, writers, mapping, memory.name)
            found = elastic_launch(settings(start_method=method), use_all)(*shared)

            assert found == {0: "used", 1: "used"}
            assert dict(mapping) == dict.fromkeys((0, 1), bytes(mp.current_process().authkey))
        assert {queue.get(timeout=LIMIT), queue.get(timeout=LIMIT)} == {simple.get(), simple.get()} == {0, 1}
        assert value.value == 2
        assert list(array) == [9, 9]
        assert [each.recv() for each in readers] == [0, 1]
        assert bytes(memory.buf[:2]) == b"\7\7"
    finally:
        memory.close()
        memory.unlink()
        queue.close()


def send(end: Any, text: str) -> str:
    """Over *end*, by a worker that has a file open at the number that it has in the caller."""
    end.send(text)
    return text


def test_pipe_end_as_argument_works_in_worker_and_pool(tmp_path: Path) -> None:
    reader, writer = mp.Pipe(duplex=False)
    for method in ("forkserver", "spawn"):
        elastic_launch(settings(1, start_method=method), send)(writer, method)
        assert reader.poll(LIMIT)
        assert reader.recv() == method
    with pool(1, group=None, preload=()) as made:
        for text in ("first", "second"):
            made.run(send, writer, text)
            assert reader.recv() == text


def send_and_fail_once(end: Any, mark: str) -> None:
    end.send(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if not os.path.exists(mark):
        Path(mark).touch()
        raise RuntimeError("once")


def test_a_restarted_worker_has_the_descriptor_again(tmp_path: Path) -> None:
    reader, writer = mp.Pipe(duplex=False)
    elastic_launch(settings(1, max_restarts=1), send_and_fail_once)(writer, str(tmp_path / "mark"))
    assert [reader.recv(), reader.recv()] == ["0", "1"]


def answer(end: socket.socket) -> bytes:
    with end:
        end.sendall(b"from the worker")
    return b"sent"


def test_a_socket_is_shared() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert elastic_launch(settings(1), answer)(theirs) == {0: b"sent"}
        assert ours.recv(100) == b"from the worker"


class Holder:
    """Has a descriptor, of which pickle sees a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        return self.number


def take(_: object) -> None:
    pass


@pytest.mark.parametrize("make", [lambda: selectors.SelectSelector(), lambda: Holder(1), threading.Lock])
def test_object_with_descriptor_number_or_lock_is_refused_by_name(make: Callable[[], object]) -> None:
    with pytest.raises(PicklingError, match="argument 0 of take, a "):
        elastic_launch(settings(1), take)(make())


def write_first(memory: shared_memory.SharedMemory) -> None:
    memory.buf[0] += 1
    memory.close()


@pytest.mark.parametrize("method", METHODS)
def test_shared_memory_outlives_the_workers_that_got_it(method: str) -> None:
    memory = shared_memory.SharedMemory(create=True, size=8)
    try:
        for _ in range(2):
            elastic_launch(settings(1, start_method=method), write_first)(memory)
        assert memory.buf[0] == 2
    finally:
        memory.close()
        memory.unlink()


def test_lock_of_the_fork_context_is_refused() -> None:
    with pytest.raises(PicklingError, match=r"argument 0 of take, a Lock, cannot be sent .*fork context"):
        elastic_launch(settings(1), take)(mp.get_context("fork").Lock())


def test_calls_with_shared_objects_leave_no_descriptor() -> None:
    reader, writer = mp.Pipe(duplex=False)
    with pool(1, group=None, preload=()) as made:
        made.run(send, writer, "warm")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            made.run(send, writer, "again")
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, LIMIT)
        opened = {made.run(count_open)[0] for _ in range(3)}
        made.run(send, writer, "again")
        assert {made.run(count_open)[0]} == opened
    assert [reader.recv() for _ in range(7)] == ["warm", *["again"] * 6]


def count_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def operators(packet: Any, overload: Any, space: Any, everything: Any) -> list[bool]:
    import torch

    add = torch.ops.aten.add
    return [packet is add, overload is add.Tensor, space is torch.ops.aten, everything is torch.ops]


def test_operators_of_torch_travel_by_name() -> None:
    torch = pytest.importorskip("torch")
    add = torch.ops.aten.add
    assert elastic_launch(settings(1), operators)(add, add.Tensor, torch.ops.aten, torch.ops) == {0: [True] * 4}
