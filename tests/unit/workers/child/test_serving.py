"""When a worker begins to serve: as soon as it has torch, once, and never at the cost of the worker."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

from elasticlib.workers.child import _serving

FAKE = """
class _WorkerServer:
    def __init__(self, path):
        if path == "taken":
            raise RuntimeError("taken already exists")
        self.path = path
"""


@pytest.fixture(autouse=True)
def fake_torch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch that has a debug server and nothing else; no torch is loaded."""
    compiled = tmp_path / "torch" / "_C"
    compiled.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("import json\nfrom torch import _C\n")
    (compiled / "__init__.py").write_text("")
    (compiled / "_distributed_c10d.py").write_text(FAKE)
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torch"}
    importers = list(sys.meta_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_serving, "_running", [])
    monkeypatch.setenv(_serving.SERVER_VARIABLE, "wanted")
    monkeypatch.delenv(_serving.SERVED_VARIABLE, raising=False)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
    sys.modules.update(real)
    sys.meta_path[:] = importers
    os.environ.pop(_serving.SERVED_VARIABLE, None)


def served() -> list[str]:
    return [server.path for server in _serving._running]  # type: ignore[attr-defined]


def variables() -> tuple[str | None, str | None]:
    return os.environ.get(_serving.SERVER_VARIABLE), os.environ.get(_serving.SERVED_VARIABLE)


def test_worker_with_loaded_torch_serves_at_once_and_clears_request() -> None:
    importlib.import_module("torch")

    _serving.serve_with_torch("wanted")

    assert (["wanted"], (None, "wanted")) == (served(), variables())


def test_worker_without_torch_serves_only_once_torch_is_imported() -> None:
    _serving.serve_with_torch("wanted")
    importlib.import_module("colorsys")
    before = served(), variables()

    torch = importlib.import_module("torch")

    assert ([], ("wanted", None)) == before
    assert (["wanted"], (None, "wanted")) == (served(), variables())
    assert "exec_module" not in vars(torch.__loader__)
    assert not any(isinstance(each, _serving.ImportWaiter) for each in sys.meta_path)


def test_to_look_whether_there_is_torch_is_not_to_load_it() -> None:
    _serving.serve_with_torch("wanted")

    found = importlib.util.find_spec("torch")
    before = served()
    importlib.import_module("torch")

    assert found is not None
    assert ([], ["wanted"]) == (before, served())


def test_a_process_that_the_worker_has_forked_leaves_the_socket_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _serving.serve_with_torch("wanted")
    monkeypatch.setattr(os, "getpid", lambda: 1)

    importlib.import_module("torch")

    assert [] == served()


def test_a_server_that_cannot_start_is_a_line_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("torch")

    _serving.serve_with_torch("taken")

    assert "this worker has no debug server at taken: taken already exists" in capsys.readouterr().err
    assert [] == served()
