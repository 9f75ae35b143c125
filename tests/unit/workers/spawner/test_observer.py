"""Which lookups in the environment count as reads: each by itself, and none that copies it all."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from elasticlib.workers.spawner import _leftovers
from elasticlib.workers.spawner._observer import _METHODS, Absences, Observer, names_in

THERE, ABSENT = "ELASTICLIB_THERE", "ELASTICLIB_ABSENT"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One variable that is there, between others, and one that is not."""
    for name in ("ELASTICLIB_BEFORE", THERE, "ELASTICLIB_AFTER"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv(ABSENT, "x")  # so that it is taken away again
    monkeypatch.delenv(ABSENT)
    yield


def observed(action: Callable[[], object]) -> Observer:
    observer = Observer()
    with observer.observing():
        action()
    return observer


def _refused(action: Callable[[], object]) -> None:
    with pytest.raises(KeyError) as caught:
        action()
    assert (ABSENT,) == caught.value.args


@pytest.mark.parametrize(
    ("action", "name"),
    [
        (lambda: os.environ[THERE], THERE),
        (lambda: os.environ.get(ABSENT), ABSENT),
        (lambda: os.getenv(ABSENT, "1"), ABSENT),
        (lambda: THERE in os.environ, THERE),
        (lambda: ABSENT not in os.environ, ABSENT),
        (lambda: os.environb.get(os.fsencode(ABSENT)), ABSENT),
        (lambda: os.getenvb(os.fsencode(THERE)), THERE),
        (lambda: (THERE, "1") in os.environ.items(), THERE),
        (lambda: THERE in os.environ.keys(), THERE),
        (lambda: os.environ.pop(ABSENT, None), ABSENT),
        (lambda: _refused(lambda: os.environ[ABSENT]), ABSENT),
        (lambda: _refused(lambda: os.environ.__delitem__(ABSENT)), ABSENT),
        (lambda: os.path.expandvars(f"${THERE}"), THERE),
        (lambda: string.Template(f"${THERE}").substitute(os.environ), THERE),
        (lambda: f"%({THERE})s" % os.environ, THERE),
        (lambda: [os.environ[each] for each in os.environ if each == THERE], THERE),
    ],
)
def test_a_lookup_of_a_name_is_a_read(action: Callable[[], object], name: str) -> None:
    assert {name} == observed(action).names


def _merged() -> dict[str, str]:
    return {**os.environ, "MINE": "1"}


def _first_item() -> object:
    return next(iter(os.environ.items()))


@pytest.mark.parametrize(
    "action",
    [
        lambda: dict(os.environ),
        lambda: os.environ.copy(),
        lambda: os.environ | {"MINE": "1"},
        lambda: {} | os.environ,
        _merged,
        lambda: {}.update(os.environ),  # type: ignore[arg-type]
        lambda: list(os.environ),
        lambda: dict(os.environ.items()),
        lambda: list(os.environ.values()),
        lambda: "x" in os.environ.values(),
        lambda: {name: os.environ[name] for name in os.environ},
        lambda: [value for name, value in os.environ.items() if name.startswith("ELASTICLIB_")],
        lambda: os.environ == {},
        lambda: repr(os.environ),
        lambda: len(os.environ),
        lambda: dict(os.environb),
        _first_item,
        lambda: subprocess.run(["/bin/true"], check=True),
    ],
)
def test_a_copy_of_all_is_no_read(action: Callable[[], object]) -> None:
    found = observed(action)

    assert (set(), {}, set()) == (found.names, found.defaults, found.written)


def test_a_lookup_beside_a_copy_is_a_read() -> None:
    """Whatever name the copy would have looked up next."""

    def first_of_all() -> None:
        names = list(os.environ)
        assert os.environ[names[0]] is not None
        dict(os.environ)
        assert os.environ[THERE]

    assert {next(iter(os.environ)), THERE} == observed(first_of_all).names


def test_what_was_set_before_it_was_looked_up_is_no_read() -> None:
    def write_first() -> None:
        os.environ[ABSENT] = "1"
        assert os.environ[ABSENT] == os.environ.pop(ABSENT) == "1"

    found = observed(write_first)

    assert (set(), {ABSENT}) == (found.names, found.written)


def test_what_was_looked_up_before_it_was_set_is_a_read() -> None:
    def read_first() -> None:
        if ABSENT not in os.environ:
            os.environ[ABSENT] = "1"

    found = observed(read_first)

    assert ({ABSENT}, set()) == (found.names, found.written)


def test_what_was_set_after_a_copy_is_a_read() -> None:
    """The copy may have been asked whether it is there."""

    def look_in_a_copy() -> None:
        if ABSENT not in dict(os.environ):
            os.environ[ABSENT] = "1"

    assert {ABSENT} == observed(look_in_a_copy).names


def test_a_default_is_noted_with_its_value() -> None:
    def set_defaults() -> None:
        assert os.environ.setdefault(ABSENT, "mine") == os.environ[ABSENT] == "mine"
        assert os.environ.setdefault(THERE, "mine") == "x"

    found = observed(set_defaults)

    assert (set(), {ABSENT: "mine", THERE: "mine"}) == (found.names, found.defaults)


def test_a_default_after_a_lookup_is_a_read() -> None:
    def look_then_set() -> None:
        os.environ.get(ABSENT)
        os.environ.setdefault(ABSENT, "mine")

    assert ({ABSENT}, {}) == ((found := observed(look_then_set)).names, found.defaults)


def test_nothing_of_the_observer_stays() -> None:
    methods = {name: type(os.environ).__dict__[name] for name in _METHODS}
    observer = Observer()

    with observer.observing():
        kept = os.environ.__getitem__

    assert methods == {name: type(os.environ).__dict__[name] for name in _METHODS}
    assert "x" == kept(THERE) and set() == observer.names


def test_what_an_import_puts_in_the_place_of_a_method_stays() -> None:
    environ = type(os.environ)
    plain = environ.__getitem__

    def own(self: os._Environ[str], key: str) -> str:
        return plain(self, key)

    try:
        with Observer().observing():
            environ.__getitem__ = own  # type: ignore[assignment, method-assign]
        assert environ.__dict__["__getitem__"] is own
    finally:
        environ.__getitem__ = plain  # type: ignore[method-assign]


def test_what_is_no_name_fails_as_ever() -> None:
    with Observer().observing():
        with pytest.raises(TypeError, match="str expected"):
            os.environ[5]  # type: ignore[index]
        with pytest.raises(TypeError, match="str expected"):
            os.environ.setdefault(ABSENT, 5)  # type: ignore[arg-type]
    assert ABSENT not in os.environ


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("", set()),
        ("import apport_hook\napport_hook.install()", set()),
        ("import os\nif os.environ.get('A'): pass\nb = os.environ [ \"B\" ]", {"A", "B"}),
        ("import os\nos.environ.pop( 'A', None); os.environ.setdefault('B', '1'); os.getenv(\n'C')", {"A", "B", "C"}),
        ("import os\nif 'A' in os.environ or 'B' not in os.environ: os.environb[b'C'] = b'1'", {"A", "B", "C"}),
        ("import os\nfor name in os.environ: print(name)", None),
        ("import os\nos.environ.get(name)", None),
        ("import os\n'A' in os.environ.values()", None),
        ("from os import environ\nenviron['A']", None),
        ("from os import getenv\ngetenv('A')", None),
        ("exec(open('/etc/more').read())", None),
    ],
)
def test_code_that_ran_unobserved_looks_up_what_is_plain_from_its_text(source: str, names: set[str] | None) -> None:
    """Else nobody can tell."""
    assert names == names_in(source)


def test_a_module_that_copies_the_environment_of_a_worker_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """A launcher within a worker has RANK in its own environment."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.syspath_prepend(str(tmp_path))
    with open(f"{tmp_path}/copies_its_environment.py", "w", encoding="utf-8") as file:
        file.write("import os\nmine = [v for k, v in dict(os.environ).items()], list(os.environ.values())\n")

    assert None is _leftovers.why_refused("copies_its_environment")


def test_modules_that_nobody_finds_are_noted_and_the_finders_stay_as_they_were() -> None:
    finders, absences = list(sys.meta_path), Absences()

    with absences.observing():
        for name in ("not_there_at_all", "json.not_there_either"):
            with pytest.raises(ModuleNotFoundError, match=name):
                __import__(name)
        __import__("colorsys")

    assert {"not_there_at_all"} == absences.names
    assert finders == sys.meta_path


@pytest.mark.slow
def test_our_own_part_of_a_fork_server_reads_no_variable() -> None:
    """It is imported before anything is observed."""
    check = (
        "from elasticlib.workers.spawner._observer import Observer\n"
        "import sys\nobserver = Observer()\n"
        "with observer.observing():\n    import elasticlib.workers.spawner._fork_server\n"
        "print(observer.names | set(observer.defaults) | observer.written)"
    )

    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)

    assert "set()\n" == done.stdout
