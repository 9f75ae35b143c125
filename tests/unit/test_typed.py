"""Nothing is decided by the wording of a sentence: with nonsense in its place the decisions are the same."""

from __future__ import annotations

import ast
import io
import pathlib
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

import elasticlib
from elasticlib import LaunchConfig
from elasticlib.cli._request import by_source
from elasticlib.cli._terminal import picture_of
from elasticlib.errors import ConfigError, PreloadError, RendezvousTimeoutError
from elasticlib.job._status import JobStatus, RankStatus
from elasticlib.processes import without_garbage_collection
from elasticlib.rendezvous.sidecar import _bridge, _sidecar_client
from elasticlib.testing.ranks import _collectives
from elasticlib.testing.ranks._collectives import At, Collective
from elasticlib.workers.captures import _parts
from elasticlib.workers.captures._call_pickler import CallPickler
from elasticlib.workers.captures._parts import CapturedCall

NONSENSE = "mimsy were the borogoves"


@pytest.fixture
def nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every sentence of the table."""
    for owner, name, replacement in sentences():
        monkeypatch.setattr(owner, name, replacement)


def sentences() -> Iterator[tuple[Any, str, Any]]:
    """(module or class, name of what makes a sentence there, what makes nonsense instead)."""
    cells, parts_of = RankStatus.cells, _parts.parts_of
    yield ConfigError, "__str__", lambda _: NONSENSE
    yield PreloadError, "__str__", lambda _: NONSENSE
    yield RankStatus, "cells", lambda rank: [NONSENSE] * len(cells(rank))
    yield _collectives, "ranks_text", lambda _: NONSENSE
    yield _parts, "parts_of", lambda *args: [attrs.evolve(part, name=NONSENSE) for part in parts_of(*args)]


def refused(action: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        action()
    return caught.value


RANK = RankStatus(0, 0, 0, "host", "failed", 7, 3, 0, None, None, {}, None, "")
JOB = JobStatus("train.py", "running", "", 12.4, 0, 0, 1, (RANK,))


@pytest.mark.usefixtures("nonsense")
@pytest.mark.parametrize(
    ("error", "option"),
    [
        (refused(lambda: LaunchConfig(1, 1, 0)), "nproc_per_node"),
        (refused(lambda: LaunchConfig(1, 1, 1, start_method="thread")), "start_method"),
        (refused(lambda: LaunchConfig(1, 1, 1, wait_for="all", rdzv_endpoint="node0:29500")), "wait_for"),
        (PreloadError("antigravity", "it opens a browser"), "preload"),
        (ConfigError.of_setting("rdzv_configs", "{}: unknown"), "rdzv_conf"),
    ],
)
def test_an_error_is_about_an_option_by_its_field(error: ConfigError, option: str) -> None:
    error.args = (NONSENSE,)

    assert "--given" == by_source(error, {option: "--given"}).setting


@pytest.mark.usefixtures("nonsense")
def test_an_error_keeps_its_setting_on_its_way_from_another_process() -> None:
    error = ConfigError.of_setting("rdzv_endpoint", NONSENSE)
    message = _bridge.error_message(error)

    rebuilt = _sidecar_client.rebuilt_error(message["kind"], message["setting"], message["text"])

    assert "rdzv_endpoint" == pickle.loads(pickle.dumps(rebuilt)).setting
    assert "setting" not in _bridge.error_message(RendezvousTimeoutError(NONSENSE))


@pytest.mark.usefixtures("nonsense")
def test_a_failed_rank_is_red() -> None:
    pytest.importorskip("rich")
    from elasticlib.cli._terminal import _drawn

    rows: Any = _drawn(picture_of(JOB, 1))

    assert "red" == rows.renderables[1].columns[1]._cells[0].style


@pytest.mark.usefixtures("nonsense")
@pytest.mark.parametrize(("source", "is_global"), [("return lock", True), ("return given", False)])
def test_a_guard_is_advised_for_global_variables_alone(source: str, is_global: bool) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "lock": threading.Lock()}
    exec(f"def function(given=None): {source}", namespace)
    call = CapturedCall(namespace["function"], () if is_global else (threading.Lock(),), {})

    text = _parts.refusal(
        call, TypeError(NONSENSE), CallPickler(io.BytesIO(), apart=True), pickle.dumps, is_of_script=True
    )

    assert is_global == ("__name__ == '__main__'" in text)


@pytest.mark.usefixtures("nonsense")
@pytest.mark.parametrize(("waiting", "verb"), [(1, "waits"), (2, "wait")])
def test_verbs_agree_with_the_number_of_ranks(waiting: int, verb: str) -> None:
    ranks = {rank: {"0": At(2, (Collective(2, "barrier", ""),))} for rank in range(waiting)}

    [line] = _collectives.describe(ranks)

    assert f"{NONSENSE} {verb} in collective" in line


# The same for whatever is written later.

HOUSE = pathlib.Path(elasticlib.__file__).parent
OTHERS_TEXT = {
    "engines/_slurm_jobs.py": "Slurm's name before a line of its errors",
    "notebook/_worker_errors.py": "CPython's line between an exception and its cause",
    "pools/_pool_workers.py": "torch's ValueError for a second process group",
    "rendezvous/stores/_c10d.py": "torch's RuntimeError of a build without libuv",
    "rendezvous/stores/_torch_store.py": "torch's C++ stack behind a message",
    "rendezvous/stores/etcd/_v3.py": "etcd's reason for a refused request",
    "utils/distributed.py": "torch's DistNetworkError for a port in use",
    "workers/_failure.py": "CPython's fault handler",
    "processes/_reaper.py": "the command of multiprocessing's resource tracker",
    "preload/_import_watch.py": "CPython's name for the frames of importlib",
}
"""Files that search the text of others, which has no type: whose it is."""
NAMES = {
    "engines/_agent_frames.py": "the mark before an agent's first frame",
    "testing/ranks/_isolation.py": "a kind of process state",
    "workers/child/_function.py": "a kind of file in memory",
    "workers/child/_pooled.py": "a kind of file in memory",
}
"""Files that search names with spaces, which nobody reads."""
SEARCHES = frozenset("startswith endswith removeprefix removesuffix partition rpartition find rfind split".split())
SENTENCE = re.compile(r"[A-Za-z]{2,}[,;:]? +[A-Za-z(]|^[a-z]+ $")


def searches(file: pathlib.Path) -> list[int]:
    """Return the lines of *file* that look for words in a text, or into the text of an error."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    texts = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def is_sentence(node: ast.AST) -> bool:
        node = texts.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Tuple):
            return any(map(is_sentence, node.elts))
        return isinstance(node, ast.Constant) and SENTENCE.search(str(node.value)) is not None

    def is_text_of_error(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node.func.id == "str" and isinstance(node.args[0], ast.Name)
        return False

    def looks(node: ast.AST) -> bool:
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            in_names = isinstance(node.comparators[0], (ast.Tuple, ast.Set, ast.Dict))
            return is_text_of_error(node.comparators[0]) or (is_sentence(node.left) and not in_names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
            return is_text_of_error(node.func.value) or any(map(is_sentence, node.args))
        return False

    nodes = (node for node in ast.walk(module) if isinstance(node, (ast.Compare, ast.Call)))
    return [node.lineno for node in nodes if looks(node)]


def test_only_text_from_others_is_searched_for_wording() -> None:
    with without_garbage_collection():  # trees of all modules make little garbage and many objects to search
        found = {file.relative_to(HOUSE).as_posix() for file in HOUSE.rglob("*.py") if searches(file)}

    assert {*OTHERS_TEXT, *NAMES} == found
