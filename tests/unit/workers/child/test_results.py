"""Results of a worker: by name if both sides have it in ``__main__``, otherwise by value."""

from __future__ import annotations

import pickle
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import pytest

from elasticlib.workers.child._result_pickles import pack_exception, pack_result, unpack_exception


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of ``__main__``."""
    kind = type("Point", (), {"__module__": "__main__", "side": "worker"})
    monkeypatch.setattr(sys.modules["__main__"], "Point", kind, raising=False)
    return kind


@pytest.fixture
def launchers_point(point: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a call that installs the launcher's class of that name, for use after packing."""
    kind = type("Point", (), {"__module__": "__main__", "side": "launcher"})

    def become_the_launcher() -> Any:
        monkeypatch.setattr(sys.modules["__main__"], "Point", kind)
        return kind

    return become_the_launcher


@pytest.mark.parametrize("shared", [["Point"], None], ids=["both have it", "a forked caller has all"])
def test_a_class_that_both_sides_have_travels_by_name(
    shared: list[str] | None, point: Any, launchers_point: Any
) -> None:
    packed = pack_result((point, point()), shared)
    there = launchers_point()

    kind, found = pickle.loads(packed)
    assert kind is type(found) is there


def test_a_class_that_only_the_worker_has_travels_by_value(point: Any, launchers_point: Any) -> None:
    packed = pack_result(point(), ())
    there = launchers_point()

    found = pickle.loads(packed)
    assert type(found) is not there
    assert found.side == "worker"


def test_class_redefined_by_the_worker_is_sent_by_value(point: Any, launchers_point: Any) -> None:
    anew = type("Point", (), {"__module__": "__main__", "side": "anew"})

    packed = pack_result(anew(), ["Point"])
    launchers_point()

    assert pickle.loads(packed).side == "anew"


@pytest.mark.parametrize("value", [None, 1.5, "text", b"\0" * 100_000, {"a": [1, (2,)]}, range(3), print])
def test_plain_values_arrive_unchanged(value: object) -> None:
    assert pickle.loads(pack_result(value, ())) == value


def test_value_that_cannot_be_pickled_raises_an_error() -> None:
    with pytest.raises(TypeError, match="lock"):
        pack_result(threading.Lock(), ())


# Exceptions: as much of them as can travel.


class TwoNeeded(Exception):  # noqa: N818
    """Cannot be made of its ``args``."""

    def __init__(self, first: str, second: object) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


class Decorated(ValueError):  # noqa: N818
    """Makes another text of what it is made of."""

    def __init__(self, code: object) -> None:
        super().__init__(f"code {code}")
        self.code = code


class TextFromField(LookupError):  # noqa: N818
    """Its text comes from a field."""

    def __str__(self) -> str:
        return f"lost {self.what}"  # type: ignore[attr-defined]


def with_fields(error: BaseException, **fields: object) -> BaseException:
    vars(error).update(fields)
    return error


def there(error: BaseException) -> BaseException:
    found = unpack_exception(pack_exception(error, ()))
    assert found is not None
    assert str(error) == str(found)
    return found


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad", 3),
        KeyError("name"),
        FileNotFoundError(2, "no such file", "x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
        TwoNeeded("1", 2),
        Decorated(5),
        with_fields(ValueError("bad"), code=5),
    ],
    ids=repr,
)
def test_exception_arrives_unchanged(error: BaseException) -> None:
    found = there(error)

    assert (type(error), error.args, vars(error)) == (type(found), found.args, vars(found))


class Slotted(Exception):  # noqa: N818
    """Holds what is not in its ``__dict__``, nor in what it is made of."""

    __slots__ = ("code", "unset")
    code: object


class NotFound(ImportError):  # noqa: N818
    """Cannot be made of its ``args``, and holds what an `ImportError` does."""

    def __init__(self, module: str, needed_by: str) -> None:
        super().__init__(f"{needed_by} needs {module}", name=module)


def with_code(code: object) -> Slotted:
    error = Slotted("bad")
    error.code = code
    return error


def raised(function: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (raised(lambda: nothing), {"name": "nothing"}),  # type: ignore[name-defined]  # noqa: F821
        (raised(lambda: threading.nothing), {"name": "nothing"}),  # type: ignore[attr-defined]
        (raised(lambda: __import__("nothing")), {"name": "nothing"}),
        (NotFound("flash", "train"), {"name": "flash", "msg": "train needs flash"}),
        (with_code(7), {"code": 7}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_an_exception_outside_its_dictionary_are_sent(
    error: BaseException, attributes: dict[str, object]
) -> None:
    found = there(error)

    assert type(error) is type(found)
    assert attributes == {name: getattr(found, name) for name in attributes}


def test_object_of_an_attribute_error_is_not_sent() -> None:
    error = raised(lambda: Big.nothing)  # type: ignore[attr-defined]

    assert (Big, None) == (getattr(error, "obj", None), getattr(there(error), "obj", None))
    assert b"Big" not in pack_exception(error, ()).replace(str(error).encode(), b"")


class Big:
    """Stands for a model."""


def test_of_slots_what_cannot_travel_or_was_not_set_is_left_out() -> None:
    found = there(with_code(threading.Lock()))

    assert Slotted is type(found)
    assert not hasattr(found, "code") and not hasattr(found, "unset")


def test_field_that_cannot_be_sent_is_left_out_and_the_rest_arrives() -> None:
    found = there(with_fields(TwoNeeded("1", 2), lock=threading.Lock(), code=5))

    assert TwoNeeded is type(found)
    assert {"first": "1", "second": 2, "code": 5} == vars(found)


@pytest.mark.parametrize("args", [(threading.Lock(),), ("bad", threading.Lock(), 3)], ids=["alone", "among others"])
def test_argument_that_cannot_be_sent_is_replaced_by_its_text(args: tuple[object, ...]) -> None:
    found = there(ValueError(*args))

    assert ValueError is type(found)
    assert [value for value in args if isinstance(value, (str, int))] == [
        value for value in found.args if type(value) in (str, int)
    ]


def test_text_is_kept_by_a_class_of_that_name_where_a_field_is_missing() -> None:
    found = there(with_fields(TextFromField(), what=threading.Lock()))

    assert isinstance(found, TextFromField)
    assert "TextFromField" == type(found).__name__


def test_for_a_class_that_cannot_travel_stands_the_nearest_above_it() -> None:
    class Local(Decorated):
        lock = threading.Lock()

    found = there(Local(5))

    assert isinstance(found, Decorated)
    assert ("Local", 5) == (type(found).__name__, found.code)


def test_for_a_class_that_the_launcher_lacks_stands_the_nearest_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("of_the_worker")
    kind = type("StepError", (ArithmeticError,), {"__module__": module.__name__})
    module.StepError = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    packed = pack_exception(with_fields(kind("too large", 7), step=3), ())
    monkeypatch.delitem(sys.modules, module.__name__)

    found = unpack_exception(packed)

    assert isinstance(found, ArithmeticError)
    assert ("of_the_worker.StepError: ('too large', 7)\n", ("too large", 7), {"step": 3}) == (
        traceback.format_exception_only(type(found), found)[0],
        found.args,
        vars(found),
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no groups in this Python")
def test_a_group_of_which_a_part_cannot_travel_keeps_its_name_and_text() -> None:
    group = ExceptionGroup("two", [ValueError("bad"), with_fields(ValueError(threading.Lock()))])  # type: ignore[name-defined]  # noqa: F821

    found = there(group)

    assert "ExceptionGroup" == type(found).__name__


def test_an_exception_that_has_no_text_travels_too() -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise TypeError("no text")

        __repr__ = __str__

    found = unpack_exception(pack_exception(Mute(Mute()), ()))

    assert "Mute" == type(found).__name__


def test_bytes_that_are_not_an_exception_unpack_to_none() -> None:
    assert [None] * 4 == [
        unpack_exception(each) for each in (b"", b"rubbish", pickle.dumps(ValueError("bad")), pickle.dumps({"a": 1}))
    ]


def test_a_module_of_a_class_of_its_own_travels_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config(types.ModuleType):
        def __reduce__(self) -> str:
            raise TypeError("it has no way to be pickled")

    config = Config("config_of_a_library")
    monkeypatch.setitem(sys.modules, config.__name__, config)

    assert pickle.loads(pack_result({"config": config}, None)) == {"config": config}
    with pytest.raises(TypeError, match="no way to be pickled"):
        pack_result(Config("config_of_a_library"), None)
