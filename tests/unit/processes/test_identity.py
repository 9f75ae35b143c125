"""What the kernel knows a thread by."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticlib.processes import CallerIdentity, _caller

_PR_SET_NO_NEW_PRIVS = 38


def test_a_program_that_changed_nothing_is_the_same() -> None:
    assert CallerIdentity.now() == CallerIdentity.now()


def test_a_thread_has_credentials_of_its_own() -> None:
    """On Linux; those of the thread that launches are what counts."""

    def give_up_privileges() -> CallerIdentity:
        assert 0 == ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return CallerIdentity.now()

    before = CallerIdentity.now()
    with ThreadPoolExecutor(1) as thread:
        restricted = thread.submit(give_up_privileges).result()

    assert before != restricted
    assert before == CallerIdentity.now()


def test_without_proc_it_is_told_by_what_the_system_itself_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: object, *_: object, **__: object) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(_caller.os, "open", hidden)
    monkeypatch.setattr(_caller.os, "readlink", hidden)
    before = CallerIdentity.now()
    monkeypatch.setattr(os, "getresuid", lambda: (65534, 65534, 65534))

    assert before != CallerIdentity.now()
