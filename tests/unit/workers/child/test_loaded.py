"""Contents of ``sys.modules``, recognized by their type alone."""

from __future__ import annotations

import types
from typing import Any

import pytest

from elasticlib.workers.child._loaded import file_of_module, is_module, names_of_module
from tests.process.scripts.strange_modules import LikeCffi, Mute, MuteModule, lazy


@pytest.mark.parametrize("found", [LikeCffi(), None, "text", types], ids=["cffi", "none", "text", "module"])
def test_only_a_module_is_one(found: Any) -> None:
    assert (found is types) == is_module(found)


def test_object_that_raises_on_every_access_is_not_accessed() -> None:
    mute = Mute()

    assert (False, 0, True) == (is_module(mute), len(names_of_module(mute)), file_of_module(mute) is None)


def test_names_of_a_module_are_its_own_whatever_its_class_returns() -> None:
    module = MuteModule("mute")
    vars(types.ModuleType)["__dict__"].__get__(module)["__file__"] = "/mute.py"

    assert ("mute", "/mute.py") == (names_of_module(module)["__name__"], file_of_module(module))


def test_a_lazy_module_stays_unloaded() -> None:
    module = lazy("imaplib")

    assert "IMAP4" not in names_of_module(module)
    assert str(file_of_module(module)).endswith("imaplib.py")


def test_module_file_that_is_not_text_counts_as_none() -> None:
    module = types.ModuleType("odd")
    module.__file__ = ["no", "text"]  # type: ignore[assignment]

    assert file_of_module(module) is None
