"""Patches by ``monkeypatch`` and ``unittest.mock`` in pytest's process: valid in ranks until undone."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

MODULE = """
class Thing:
    size = 1
    table = {"a": 1}
    def who(self): return "real"
    @classmethod
    def make(cls): return "real make"
    @staticmethod
    def static(): return "real static"
    @property
    def prop(self): return "real prop"

TABLE = {"a": 1, "b": 2}
removed = 5
instance = Thing()
def call(): return "real"
def use(): return call()
"""

CONFTEST = """
import module, pytest

@pytest.fixture(scope="session")
def for_session():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SESSION", "yes", raising=False)
        yield

@pytest.fixture(scope="module")
def for_module():
    patch = pytest.MonkeyPatch()
    patch.setitem(module.TABLE, "m", 7)
    yield
    patch.undo()
"""

CODE = """
import os, sys, threading, types
from unittest import mock
import pytest, torch.distributed as dist
import module, package.inner
from module import Thing

on_ranks = pytest.mark.elastic
os.environ["SET_BY_MODULE"] = "x"

@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(module, "call", lambda: "fake")
    monkeypatch.setattr("module.Thing.who", lambda self: "fake who")
    monkeypatch.setattr(Thing, "make", classmethod(lambda cls: cls.__name__))
    monkeypatch.setattr(Thing, "static", staticmethod(lambda: "fake static"))
    monkeypatch.setattr(Thing, "prop", property(lambda self: "fake prop"))
    monkeypatch.setattr("package.inner.value", 9)
    monkeypatch.setattr(os, "getlogin", lambda: "me")
    monkeypatch.setattr(dist, "made_up", 3, raising=False)
    monkeypatch.setitem(module.TABLE, "a", 10)
    monkeypatch.delitem(module.TABLE, "b")
    monkeypatch.setitem(Thing.table, "z", 3)
    monkeypatch.delattr(module, "removed")
    monkeypatch.delattr("module.Thing.size")
    monkeypatch.setenv("A_VARIABLE", "1")
    monkeypatch.delenv("SET_BY_MODULE")

def check():
    thing = Thing()
    assert (module.use(), thing.who(), thing.prop) == ("fake", "fake who", "fake prop")
    assert (Thing.make(), Thing.static()) == ("Thing", "fake static")
    assert package.inner.value == 9 and os.getlogin() == "me" and dist.made_up == 3
    assert module.TABLE == {"a": 10} and Thing.table == {"a": 1, "z": 3}
    assert not hasattr(module, "removed") and not hasattr(Thing, "size")
    assert os.environ["A_VARIABLE"] == "1" and "SET_BY_MODULE" not in os.environ

def clean():
    thing = Thing()
    assert (module.use(), thing.who(), thing.prop) == ("real", "real", "real prop")
    assert (Thing.make(), Thing.static()) == ("real make", "real static")
    assert package.inner.value == 1 and not hasattr(dist, "made_up")
    assert module.TABLE == {"a": 1, "b": 2} and Thing.table == {"a": 1}
    assert module.removed == 5 and Thing.size == 1
    assert "A_VARIABLE" not in os.environ and os.environ["SET_BY_MODULE"] == "x"

@on_ranks
def test_of_a_fixture(patched): check()

@on_ranks
def test_of_a_fixture_after(): clean()

def test_around(elastic, patched, monkeypatch):
    elastic(check)
    monkeypatch.undo()
    elastic(clean)

def test_context(elastic, monkeypatch):
    for context in (pytest.MonkeyPatch.context, monkeypatch.context):
        with context() as patch:
            patch.setattr(module, "call", lambda: "one")
            patch.setattr(module, "call", lambda: "two")
            assert elastic(module.use) == {0: "two", 1: "two"}
        assert elastic(module.use) == {0: "real", 1: "real"}

def test_of_pytest_itself(elastic, monkeypatch):
    monkeypatch.setattr(pytest.Config, "rootdir", threading.Lock())  # as pytest's own plugins, for the whole session
    elastic(clean)

@on_ranks
def test_in_the_body(patched, monkeypatch, rank):
    check()
    monkeypatch.setattr(module, "call", lambda: rank)
    monkeypatch.setenv("IN_BODY", "1")
    monkeypatch.chdir("/")
    monkeypatch.syspath_prepend("/nowhere")
    assert module.use() == rank
    if rank:
        monkeypatch.undo()
        assert module.use() == "fake"

@on_ranks
def test_in_the_body_after():
    clean()
    assert "IN_BODY" not in os.environ and os.getcwd() != "/" and "/nowhere" not in sys.path

def test_mock(elastic):
    with mock.patch("module.call", lambda: "mocked"), mock.patch.object(Thing, "size", 3):
        assert elastic(lambda: (module.use(), Thing.size)).rank(1) == ("mocked", 3)
    with mock.patch.dict(module.TABLE, {"c": 3}, clear=True), mock.patch.dict(os.environ, {"MOCKED": "1"}):
        assert elastic(lambda: (module.TABLE, os.environ["MOCKED"])).rank(1) == ({"c": 3}, "1")
    with mock.patch.multiple(module, removed=6, call=lambda: "one of several"):
        assert elastic(lambda: (module.removed, module.use())).rank(1) == (6, "one of several")
    with mock.patch("module.call", return_value="canned") as call:
        assert elastic(lambda: (module.use(), module.call.call_count)).rank(1) == ("canned", 1)
    assert call.call_count == 0  # those of the ranks are other ones
    elastic(clean)

@pytest.fixture
def mocked():
    patch = mock.patch("module.removed", new=7)
    patch.start()
    yield
    patch.stop()

@on_ranks
def test_mock_of_a_fixture(mocked): assert module.removed == 7

@on_ranks
@mock.patch("module.call", return_value="in the body")
@mock.patch.dict(module.TABLE, {"a": 5})
def test_mock_in_the_body(call, rank):
    assert module.use() == "in the body" and call.call_count == 1 and module.TABLE["a"] == 5

@on_ranks
def test_mock_after(): clean()

@on_ranks
def test_session(for_session): assert module.SESSION == "yes"

@on_ranks
def test_session_stays(for_module): assert module.SESSION == "yes" and module.TABLE["m"] == 7

@pytest.fixture
def places(monkeypatch, tmp_path):
    (tmp_path / "on_the_path.py").write_text("x = 4")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path)

@on_ranks
def test_places(places):
    import on_the_path
    assert on_the_path.x == 4 and os.getcwd() == places

@on_ranks
def test_places_after(): assert not any("test_places" in path for path in [os.getcwd(), *sys.path])

def imports(name): return __import__(name).x

def test_sys(elastic, monkeypatch):
    made = types.ModuleType("made_up")
    made.x = 3
    monkeypatch.setitem(sys.modules, "made_up", made)
    monkeypatch.setitem(sys.modules, "absent", None)
    monkeypatch.setattr(sys, "argv", ["program", "--option"])
    assert elastic(imports, "made_up") == {0: 3, 1: 3}
    with pytest.raises(ImportError):
        elastic(imports, "absent")
    assert elastic(lambda: sys.argv).rank(1) == ["program", "--option"]

def test_local_class(elastic, monkeypatch):
    class Local:
        x = 1
    monkeypatch.setattr(Local, "x", 2)
    assert elastic(lambda: Local.x).rank(1) == 2

def test_own_module(elastic, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "clean", lambda: 77)
    assert elastic(calls_clean).rank(1) == 77

def calls_clean(): return clean()

def test_variables_of_ranks_stay(elastic, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MASTER_ADDR", "1.2.3.4")
    assert elastic(lambda: (os.environ["RANK"], dist.get_rank())) == {0: ("0", 0), 1: ("1", 1)}

def refused(elastic, why):
    with pytest.raises(TypeError) as info:
        elastic(clean)
    assert why in str(info.value)

def test_refused_value(elastic, monkeypatch):
    monkeypatch.setattr(module, "call", threading.Lock())
    refused(elastic, "monkeypatch.setattr(module, 'call', ...): its value, a lock, cannot be sent to the ranks")

def test_refused_instance(elastic, monkeypatch):
    monkeypatch.setattr(module.instance, "who", 1)
    refused(elastic, "'who', ...): this Thing exists only in pytest's process")

def test_refused_instance_of_pytest(elastic, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(tmp_path_factory, "who", 1, raising=False)
    refused(elastic, "'who', ...): this TempPathFactory exists only in pytest's")

def test_refused_mock(elastic):
    with mock.patch("module.call", threading.Lock()):
        refused(elastic, "mock.patch.object(module, 'call', ...): its value, a lock, cannot be sent to the ranks")
    with mock.patch.object(module.instance, "who"):
        refused(elastic, "mock.patch.object(<module.Thing object at ")
    with mock.patch.dict({}, {"key": 1}):
        refused(elastic, "mock.patch.dict({'key': 1}, 'key', ...): this dict does not exist on the ranks")

def test_refused_item(elastic, monkeypatch):
    monkeypatch.setitem({}, "key", 1)
    refused(elastic, "monkeypatch.setitem({'key': 1}, 'key', ...): this dict does not exist on the ranks")
"""


def test_patches_are_those_of_pytests_process(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.mkpydir("package").joinpath("inner.py").write_text("value = 1\n")
    # Looking for the dictionary among all modules must not warn, either.
    result = run(CODE, "-W", "error", module=MODULE)

    result.assert_outcomes(passed=24)


CONFIG = """
import functools, threading
from unittest import mock
import pytest, torch, torch._dynamo.config, torch._inductor.config
import torch.distributed as dist

def seen():
    return torch._dynamo.config.suppress_errors, torch._inductor.config.triton.cudagraphs

def set_in_ranks():
    assert seen() == (True, False)
    torch._dynamo.config.verbose = not torch._dynamo.config.verbose

def test_config(elastic):
    before = elastic(seen)[1]
    with mock.patch.object(torch._dynamo.config, "suppress_errors", True):
        assert elastic(seen)[1] == (True, False)
    with torch._dynamo.config.patch(suppress_errors=True), torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert elastic(seen)[1] == (True, True)
    assert elastic(seen)[1] == before == (False, False)

def test_monkeypatch(elastic, monkeypatch):  # whose undo leaves them deleted with pytest 9.2: with others than above
    monkeypatch.setattr(torch._dynamo.config, "assume_static_by_default", False)
    monkeypatch.setattr(torch._inductor.config.triton, "unique_kernel_names", False)
    assert elastic(others)[1] == (False, False)

def others():
    return torch._dynamo.config.assume_static_by_default, torch._inductor.config.triton.unique_kernel_names

@pytest.fixture
def errors():
    with torch._dynamo.config.patch(suppress_errors=True):
        yield

@pytest.mark.elastic
def test_of_a_fixture(errors):
    set_in_ranks()

def test_as_an_argument(elastic):
    assert elastic(lambda config: config is torch._dynamo.config, torch._dynamo.config) == {0: True, 1: True}

def test_refused(elastic):
    with torch._inductor.config.patch(post_grad_custom_post_pass=threading.Lock()):
        with pytest.raises(TypeError, match="torch._inductor.config.post_grad_custom_post_pass = .*a lock, cannot"):
            elastic(seen)
"""


def test_choices_in_torchs_configuration_are_those_of_pytests_process(run: Run) -> None:
    result = run(CONFIG)

    result.assert_outcomes(passed=5, warnings=1)
    result.stdout.fnmatch_lines(
        ["*test_of_a_fixture: ranks 0-1 changed torch's configuration: torch._dynamo.config.verbose from * to *"]
    )
