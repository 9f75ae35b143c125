"""
One test on one rank: it sets up the test's environment, calls its function and returns the outcome.

Rules of this file: every change that a test makes to this process is undone or reported. An
exception of the test is an outcome; one of this library is an error of the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from attrs import evolve

from elasticlib.stacks import CALLERS, users_part
from elasticlib.testing.process_state import _config_modules, _torch_modes
from elasticlib.testing.pytest_plugin.rank import _made, _modules, _pdb, _unhandled
from elasticlib.testing.ranks import _isolation, _outcomes, _plain
from elasticlib.testing.ranks._rank_call import Failure, MadeUp, Patch, RankCall, RankOutcome, Style
from elasticlib.workers.child import (
    can_be_pickled,
    is_secondary,
    is_worker_variable,
    pack_result,
    release_peers,
    text_of_exception,
)


def run(call: RankCall, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RankOutcome:
    if call.device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    _failed.clear()
    outcome = _plain.watched(call, lambda: _surrounded(call, function, args, kwargs))
    if outcome.kind != "passed":
        # No other exception may take the place of the test's failure.
        with contextlib.suppress(Exception):
            release_peers()

    return outcome


_OF_LAUNCHERS_GROUP = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def with_rank(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(rank, *args)``; restore the environment variables afterwards."""
    __tracebackhide__ = True
    variables = dict(os.environ)

    # With these variables torch would not use the store at the port that the function names.
    for name in _OF_LAUNCHERS_GROUP:
        os.environ.pop(name, None)
    try:
        return function(int(variables["RANK"]), *args)
    finally:
        os.environ.clear()
        os.environ.update(variables)


def _surrounded(
    call: RankCall,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> RankOutcome:
    """Run the function in the test's environment: patches, filters, log levels and fixtures."""
    rank = int(os.environ["RANK"])
    item = _made.ItemOnRank()
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.filters[:] = list(call.filters)  # type: ignore[index]

        # Drops Python's cached verdicts on warnings; the name of the call depends on the version.
        getattr(warnings, "_filters_mutated_lock_held", getattr(warnings, "_filters_mutated", lambda: None))()
        stack.enter_context(_torch_modes.as_there(call.modes))
        stack.enter_context(_config_modules.as_there(call.config))
        stack.enter_context(_patched(call.patches))
        stack.enter_context(_made.logs_of(call, item))
        stack.enter_context(_pdb.offered(call))
        fixtures = stack.enter_context(_made.made(call, item))
        given = {**kwargs, **fixtures, **_made.of_rank(call, rank)}
        entered = _pdb.entered(function) if call.trace and rank == 0 else function
        with _unhandled.collected() as unhandled, _example(call, function):
            outcome = _called(call, lambda: _returned(entered(*args, **given)))

    warned = tuple((each.message, each.category, each.filename, each.lineno) for each in caught or ())
    records = tuple(map(_made.portable, item.handler.records))
    log, properties = item.handler.stream.getvalue(), tuple(item.properties)
    outcome = evolve(outcome, warnings=_portable(warned), unhandled=tuple(unhandled))
    return evolve(outcome, records=records, log=log, properties=properties)


def _portable(warned: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the warnings in a form that can be sent; those that cannot become their texts."""
    return tuple(
        (message, category, file, line)
        if can_be_pickled((message, category))
        else (str(message), UserWarning, file, line)
        for message, category, file, line in warned
    )


@contextlib.contextmanager
def _example(call: RankCall, function: Callable[..., Any]) -> Iterator[None]:
    """Provide Hypothesis's context for an example within the block, for ``note`` and ``assume``."""
    if call.example is None:
        yield
        return

    control: Any = importlib.import_module("hypothesis.control")
    data: Any = importlib.import_module("hypothesis.internal.conjecture.data")
    try:
        # All values have been drawn already, in pytest's process.
        drawn = data.ConjectureData.for_choices(())
        context = control.BuildContext(drawn, is_final=call.example, wrapped_test=function)
    except (AttributeError, TypeError):
        # Another version lacks the name.
        context = contextlib.nullcontext()

    with context:
        yield


def _returned(value: Any) -> Any:
    """Return *value*; if it is a coroutine, run it and return its result."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _called(call: RankCall, function: Callable[[], Any]) -> RankOutcome:
    import pytest

    try:
        value = function()
        if value is not None:
            return RankOutcome("passed", value=pack_result(value, ()))
        return RankOutcome("passed")
    except (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest) as stop:
        kind = "xfailed" if isinstance(stop, pytest.xfail.Exception) else "skipped"
        return RankOutcome(kind, reason=str(stop), place=_outcomes.place(users_part(stop), call))
    except SystemExit as stop:
        # A function may exit with status 0, but the body of a test must run to its end.
        if stop.code in (None, 0) and not call.is_body:
            return RankOutcome("passed")
        return RankOutcome("failed", failure=failure_of(call, stop))
    except _outcomes.PartsError as several:
        parts = tuple((what, failure_of(call, error)) for what, error in several.parts)
        return RankOutcome("failed", failure=parts[0][1], parts=parts)
    except BaseException as error:
        return RankOutcome("failed", failure=failure_of(call, error))


_failed: list[BaseException] = []
"""Exceptions of the last call, if the user may debug them."""


def look_at_failure() -> bool | None:
    """Debug the last failure; see `_pdb.look_at`. Returns None if there is none."""
    return _pdb.look_at(_failed[0]) if _failed else None


def failure_of(call: RankCall, error: BaseException) -> Failure:
    error = error.with_traceback(users_part(error))
    if call.debug:
        _failed.append(error)
    # A lost peer's traceback consists of torch's code, which is long and explains nothing.
    if is_secondary(error):
        return _outcomes.failure(call, error, "".join(traceback.format_exception(error)))
    return _outcomes.failure(call, error, _represented(error, call))


def _represented(error: BaseException, call: RankCall) -> Any:
    """Return pytest's representation of *error*, in the style of its options."""
    import pytest
    from _pytest._code import ExceptionInfo

    style: Style = call.style
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        return str(error)
    if error.__traceback__ is None:
        return text_of_exception(error)

    try:
        info = ExceptionInfo.from_exception(error)
        kind: Any = "long" if style.tbstyle == "auto" or style.fulltrace else style.tbstyle
        return info.getrepr(
            funcargs=True,
            abspath=os.getcwd() != style.directory,
            showlocals=style.showlocals,
            style=kind,
            tbfilter=False if style.fulltrace else (lambda found: _shortened(found, style)),
            truncate_locals=style.verbosity <= 1,
        )
    except Exception as failure:
        # The exception's __str__ may raise.
        return f"{type(error).__name__}: (its traceback cannot be shown: {failure!r})"


def _shortened(info: Any, style: Style) -> Any:
    """Return the traceback without the frames that pytest hides."""
    from _pytest._code import Traceback

    frames = info.traceback.filter(info) or info.traceback
    # As pytest does: only the first and the last frame are shown in full.
    if style.tbstyle == "auto" and len(frames) > 2:
        return Traceback((frames[0], *(each.with_repr_style("short") for each in frames[1:-1]), frames[-1]))
    return frames


@contextlib.contextmanager
def _patched(patches: tuple[Patch, ...]) -> Iterator[None]:
    """Repeat the patches of pytest's process within the block."""
    if not patches:
        yield
        return

    import pytest

    with pytest.MonkeyPatch.context() as here:
        for patch in patches:
            is_variable = patch.owner is os and patch.name == "environ"
            # Each rank has its own values of these variables.
            if is_variable and is_worker_variable(patch.key):
                continue
            _apply(patch, here)
        yield


def _apply(patch: Patch, here: Any) -> None:
    if patch.is_item:
        mapping = getattr(patch.owner, patch.name)
        if patch.is_gone:
            here.delitem(mapping, patch.key, raising=False)
        else:
            here.setitem(mapping, patch.key, _value(patch))
    elif patch.is_gone:
        here.delattr(patch.owner, patch.name, raising=False)
    else:
        here.setattr(patch.owner, patch.name, patch.value, raising=False)


def _value(patch: Patch) -> Any:
    if not isinstance(patch.value, MadeUp):
        return patch.value
    made = ModuleType(patch.value.name)
    vars(made).update(patch.value.values)
    return made


def prepare(
    setting: _modules.Setting,
    modules: Mapping[str, _modules.ModulePlace],
    explains: tuple[str, ...],
    tests: tuple[str, ...],
) -> None:
    """Prepare this worker for tests; see `_modules.prepare`. Import the modules of *tests*."""
    _modules.prepare(setting, modules)
    _modules.register(explains)
    for name in tests:
        # The test that needs the module fails with the same error, and reports it.
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    _isolation.settle()


for _file in (__file__, _made.__file__, _pdb.__file__, asyncio.runners.__file__, asyncio.base_events.__file__):
    CALLERS.add(_file)
