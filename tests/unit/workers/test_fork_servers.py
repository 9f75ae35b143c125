"""Which fork server serves which launch, how many are kept, and what is left in a forked child."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from elasticlib import records
from elasticlib.errors import EntrypointError, StartError
from elasticlib.preload import _key
from elasticlib.processes import Caller, _programs
from elasticlib.processes._programs import Process, importable_by
from elasticlib.processes._wire import Channel
from elasticlib.workers import _fork_servers
from elasticlib.workers._fork_servers import ForkServerKey
from elasticlib.workers.spawner import _fork_server
from tests.patching import replace_everywhere


def key(preload: Sequence[str] = ("torch",)) -> ForkServerKey:
    return ForkServerKey("/usr/bin/python", tuple(preload))


# What two launches must have in common.


def test_other_modules_path_or_interpreter_need_a_new_fork_server() -> None:
    keys = {
        key(),
        key(preload=()),
        ForkServerKey("/usr/bin/python", ("torch",), ("/src",)),
        ForkServerKey("/opt/python", ("torch",)),
        ForkServerKey("/usr/bin/python", ("torch",), (), ("-O",)),
    }

    assert len(keys) == 5


# How many are kept.


class Fake:
    """A fork server without a process."""

    made: ClassVar[list[Fake]] = []

    def __init__(self, key: ForkServerKey, environment: Mapping[str, str], search_path: Sequence[str]) -> None:
        self.key = key
        self.spawners = 0
        self.given = environment
        self.lives, self.changed, self.imported = True, False, True
        self.has_other_owner = False
        self.closed = self.dropped = False
        Fake.made.append(self)

    def alive(self) -> bool:
        return self.lives

    def serves(self, key: ForkServerKey, environment: Mapping[str, str], caller: Caller) -> bool:
        return (self.key, self.given) == (key, environment)

    def outdated(self) -> bool:
        return self.changed

    def is_out_of_reach(self) -> bool:
        return self.has_other_owner

    def ready(self) -> bool:
        return self.imported

    def close(self, timeout: float | None = None) -> None:
        self.closed = True

    def drop(self) -> None:
        self.dropped = True


class Shelf:
    """The fork servers of a program, all of them fakes."""

    def __init__(self) -> None:
        self.fork_servers = _fork_servers._ForkServers()

    def take(self, name: str) -> Fake:
        fork_server = self.fork_servers.take(key(), {"NAME": name}, ())
        assert isinstance(fork_server, Fake)
        return fork_server

    def give_back(self, fork_server: Fake, unused: bool = False) -> None:
        self.fork_servers.give_back(fork_server, unused)  # type: ignore[arg-type]

    def use(self, name: str) -> Fake:
        fork_server = self.take(name)
        self.give_back(fork_server)
        return fork_server


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    replace_everywhere(monkeypatch, _fork_servers, "ForkServer", Fake)
    monkeypatch.setattr(Fake, "made", [])
    return Shelf()


def living() -> int:
    return sum(not fork_server.closed for fork_server in Fake.made)


def test_fork_server_serves_launches_of_its_kind(shelf: Shelf) -> None:
    first = shelf.use("a")

    assert [first] * 3 == [shelf.use("a"), shelf.take("a"), shelf.take("a")]
    assert len(Fake.made) == 1


def test_third_fork_server_closes_the_one_unused_longest(shelf: Shelf) -> None:
    first, second = shelf.use("a"), shelf.use("b")
    shelf.use("a")

    third = shelf.use("c")

    assert (first.closed, second.closed, third.closed) == (False, True, False)


def test_at_most_two_are_kept_once_launches_side_by_side_are_over(shelf: Shelf) -> None:
    busy = [shelf.take(name) for name in "abcd"]
    while_at_work = living()

    for fork_server in busy:
        shelf.give_back(fork_server)

    assert (4, 2) == (while_at_work, living())


@pytest.mark.parametrize(
    "change",
    [{"lives": False}, {"changed": True}, {"has_other_owner": True}],
    ids=["died", "its modules changed", "may not be signalled any more"],
)
def test_a_fork_server_that_no_launch_can_use_again_is_ended(change: dict[str, bool], shelf: Shelf) -> None:
    old = shelf.use("a")
    vars(old).update(change)

    new = shelf.use("a")

    assert new is not old
    assert old.closed and not new.closed


def test_fork_server_with_changed_modules_serves_its_running_launch(shelf: Shelf) -> None:
    old = shelf.take("a")
    old.changed = True
    new = shelf.take("a")
    while_running = old.closed

    shelf.give_back(old)
    shelf.use("a")

    assert new is not old
    assert (while_running, old.closed) == (False, True)


@pytest.mark.parametrize(
    ("is_ready", "others", "is_ended"),
    [(False, 0, True), (False, 1, False), (True, 0, False)],
    ids=["at its imports", "awaited by another launch", "ready"],
)
def test_an_unused_fork_server_is_ended_only_at_imports_that_nobody_awaits(
    is_ready: bool, others: int, is_ended: bool, shelf: Shelf
) -> None:
    fork_server = shelf.take("a")
    for _ in range(others):
        shelf.take("a")
    fork_server.imported = is_ready

    shelf.give_back(fork_server, unused=True)

    assert is_ended == fork_server.closed
    assert is_ended == (shelf.use("a") is not fork_server)


def test_a_fork_server_warms_up_for_a_launch_that_takes_it_later(shelf: Shelf) -> None:
    with shelf.fork_servers.warming(key(), {"NAME": "a"}, ()):
        (made,) = Fake.made
        assert shelf.use("a") is made

    assert [made] == Fake.made
    assert not made.closed


def test_a_fork_server_that_warms_up_in_vain_is_ended(shelf: Shelf) -> None:
    """As where the nodes cannot meet: nothing of a launch that failed goes on."""
    with pytest.raises(ValueError, match="nobody came"), shelf.fork_servers.warming(key(), {"NAME": "a"}, ()):
        Fake.made[0].imported = False
        raise ValueError("nobody came")

    assert Fake.made[0].closed


def test_launch_raises_the_error_if_no_fork_server_can_be_started(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise StartError("no process can be had")

    replace_everywhere(monkeypatch, _fork_servers, "ForkServer", refused)
    with shelf.fork_servers.warming(key(), {}, ()), pytest.raises(StartError):
        shelf.take("a")


def test_the_end_of_the_program_ends_all_fork_servers(shelf: Shelf) -> None:
    used = [shelf.use("a"), shelf.take("b")]

    shelf.fork_servers.close()

    assert [fork_server.closed for fork_server in used] == [True, True]


def test_a_forked_child_has_no_fork_server_and_ends_none(shelf: Shelf) -> None:
    parents = shelf.use("a")

    shelf.fork_servers.drop()
    own = shelf.use("a")

    assert own is not parents
    assert (parents.dropped, parents.closed) == (True, False)


# What a fork server says, and does not say.


@pytest.fixture
def fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_fork_servers.ForkServer, Channel]]:
    """A fork server without a process, and the other end of its channel."""
    ends = []

    def spawn(command: Sequence[str], environment: Mapping[str, str], descriptor: int, stderr: int | None) -> Process:
        ends.append(Channel.adopt(os.dup(descriptor)))
        return Process(0)

    monkeypatch.setattr(_fork_servers, "spawn", spawn)
    monkeypatch.setattr(_fork_servers, "_TALK_LIMIT", 0.05)
    made = _fork_servers.ForkServer(key(), {"READ": "1", "OTHER": "1"}, ())
    yield made, ends[0]
    made._link.close()
    os.close(made._stderr)
    ends[0].close()


READY = {"op": "ready", "pid": 1, "names": ["READ"], "named": False, "intel_openmp": False, "whole": False}


def test_fork_server_is_matched_by_the_variables_it_read_once_ready(
    fork_server: tuple[_fork_servers.ForkServer, Channel],
) -> None:
    """Before, any variable may be among that."""
    made, end = fork_server
    others = [{"READ": "1", "OTHER": "2"}, {"READ": "2", "OTHER": "1"}]
    before = [made.serves(key(), other, Caller.now()) for other in others]
    end.send(READY)

    assert [False, False] == before
    assert [True, False] == [made.serves(key(), other, Caller.now()) for other in others]
    assert not made.serves(key(preload=()), others[0], Caller.now())


def test_fork_server_serves_no_launch_after_an_installation(
    fork_server: tuple[_fork_servers.ForkServer, Channel], tmp_path: Path
) -> None:
    """An installer replaces the folder that tells the version, which changes the time of the folder around it."""
    made, end = fork_server
    (tmp_path / "package_of_mine-1.0.dist-info").mkdir()
    os.utime(tmp_path, (1.0, 1.0))
    end.send({**READY, "files": {str(tmp_path): 10**9}})
    before = made.alive() and made.outdated()
    os.rename(tmp_path / "package_of_mine-1.0.dist-info", tmp_path / "package_of_mine-2.0.dist-info")

    assert [False, True] == [before, made.outdated()]


def test_a_fork_server_that_stops_in_the_middle_of_a_message_has_failed(
    fork_server: tuple[_fork_servers.ForkServer, Channel],
) -> None:
    """And whoever looks whether it lives does not wait for the rest."""
    made, end = fork_server
    os.write(end.fileno(), b"\0\0")

    assert not made.alive()
    assert "in the middle of a message" in str(made.failure("spawner"))


def test_a_fork_server_that_takes_no_orders_has_failed(fork_server: tuple[_fork_servers.ForkServer, Channel]) -> None:
    made, _ = fork_server
    channels = []

    with pytest.raises(StartError, match="does not respond: it is suspended, or hangs"):
        for _ in range(10_000):
            channels.append(made.request("job"))

    assert channels and not made.alive()
    for channel in channels:
        channel.close()


def test_slow_import_is_reported_once_with_its_current_line(
    fork_server: tuple[_fork_servers.ForkServer, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, end = fork_server
    stack = os.memfd_create("stack")
    os.write(
        stack,
        b"Timeout (0:00:09.500000)!\nThread 0x00007f3c (most recent call first):\n"
        b'  File "/lib/slow/native.py", line 7 in wait\n'
        b'  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed\n',
    )
    end.send({"op": "importing", "module": "slow"}, (stack,))
    os.close(stack)
    in_time = made.slow_import()
    monkeypatch.setattr(_fork_servers, "_SLOW_IMPORT", 0.0)

    reported, once_more = made.slow_import(), made.slow_import()
    end.send(READY)

    assert in_time is once_more is made.slow_import() is None
    assert records.ImportTakesLong("slow", 0.0, "/lib/slow/native.py, line 7") == reported
    assert made.ready()


# Which keys are as good as another.


def automatic(*preload: str) -> ForkServerKey:
    return ForkServerKey("/usr/bin/python", preload, is_automatic=True)


@pytest.mark.parametrize(
    ("there", "wanted", "fits"),
    [
        (automatic("torch", "torch._dynamo"), automatic("torch"), True),
        (automatic("torch"), automatic("torch", "torch._dynamo"), False),
        (automatic("torch"), automatic(), False),
        (automatic(), automatic(), True),
        (key(("torch", "json")), key(("torch",)), False),
        (automatic("torch"), key(("torch",)), False),
    ],
)
def test_fork_server_with_more_allowed_imports_serves_others(
    there: ForkServerKey, wanted: ForkServerKey, fits: bool
) -> None:
    """A list that somebody gave stays exactly that list, and none means none."""
    assert fits == there.covers(wanted)


# Whether what was imported changed.


def stamps(preload: Sequence[str], folder: Path, files: Mapping[str, int] | None = None) -> dict[str, int]:
    return _key.stamps(key(preload), (str(folder),), files or {})


@pytest.mark.parametrize(
    ("preload", "name"),
    [("model_of_mine", "model_of_mine.py"), ("package_of_mine.inner", "package_of_mine/inner/__init__.py")],
)
def test_a_module_has_a_stamp_that_changes_with_its_file(preload: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    before = stamps([preload], tmp_path)
    os.utime(path, (1.0, 1.0))

    after = stamps([preload], tmp_path)

    assert set(before) == set(after) == {str(path)}
    assert before != after


def test_each_imported_file_has_a_stamp_even_if_the_file_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "imported.py"
    path.write_text("")
    os.utime(path, (1.0, 1.0))
    files = {str(path): 10**9, str(tmp_path / "gone.py"): 0}

    assert files == stamps(["torch"], tmp_path, files)


def test_an_archive_on_the_path_has_a_stamp_as_a_whole(tmp_path: Path) -> None:
    archive = tmp_path / "app.pyz"
    archive.write_bytes(b"")
    os.utime(archive, (1.0, 1.0))

    assert {str(archive): 10**9} == stamps(["model_of_mine"], archive)
    assert {f"{archive}/model.py": 10**9} == stamps(["torch"], tmp_path, {f"{archive}/model.py": 0})


def test_torch_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")

    assert stamps(["torch"], tmp_path) == {}


# Interpreters.


def test_an_interpreter_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(EntrypointError, match="PYTHON_EXEC='/no/such/python' cannot be run: No such file"):
        importable_by("/no/such/python", {})


def test_an_interpreter_that_hangs_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(_programs, "_START_LIMIT", 0.05)

    with pytest.raises(EntrypointError, match="python' has not imported elasticlib within 0"):
        importable_by(str(hangs), dict(os.environ))


@pytest.mark.slow
def test_this_interpreter_can_be_a_fork_server() -> None:
    assert importable_by(sys.executable, dict(os.environ))


@pytest.mark.slow
def test_an_interpreter_without_our_packages_cannot_be_a_fork_server(tmp_path: Path) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)

    assert not importable_by(str(bare), dict(os.environ))


def test_launch_that_cannot_be_forked_gets_the_reason() -> None:
    asker, fork_server = Channel.pair()

    _fork_server._turn_down([os.dup(fork_server.fileno())], "no process can be started")
    fork_server.close()

    assert [({"op": "broken", "why": "no process can be started"}, []), None] == [asker.receive(), asker.receive()]
    asker.close()
