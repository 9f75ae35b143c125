"""
One test on one rank: its surroundings are made, its function is called, and what came of it is told.

Rules of this file: whatever a test does to this process is undone or told as dirt; an exception of the test's is an
outcome, one of ours is an error of the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from attrs import evolve

from elasticlib._stack_text import is_library
from elasticlib.pytest_plugin._call import Call, Failure, Outcome, Patch, Style
from elasticlib.pytest_plugin.rank import _coverage, _debugger, _isolation, _made, _modules
from elasticlib.workers.child import _function, _pooled, _report, _results


def run(call: Call, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Outcome]:
    """What came of *function* on this rank; of each, where ranks are threads."""
    if call.device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    seed = call.seed + int(os.environ["RANK"])
    with _isolation.isolated(seed, checks=call.checks, has_own_group=call.has_own_group) as changes:
        with _coverage.measured(call) as measured:
            outcomes = _outcomes(call, function, args, kwargs)
    return [evolve(outcomes[0], dirt=changes(), coverage=measured()), *outcomes[1:]]


def _outcomes(
    call: Call, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Outcome]:
    """As `run`, with the test's surroundings."""
    rank = int(os.environ["RANK"])
    item = _made.Item()
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.filters[:] = list(call.filters)  # type: ignore[index]
        getattr(warnings, "_filters_mutated_lock_held", getattr(warnings, "_filters_mutated", lambda: None))()
        stack.enter_context(_patched(call.patches))
        stack.enter_context(_made.logs_of(call, item))
        stack.enter_context(_debugger.offered(call))
        fixtures = stack.enter_context(_made.made(call, item))

        def on_rank(number: int) -> Outcome:
            given = {**kwargs, **fixtures, **_made.of_rank(call, number)}
            return _called(call, lambda: _returned(function(*args, **given)))

        if call.threads:
            from elasticlib.pytest_plugin.rank import _threads

            outcomes = _threads.on_each(call.threads, on_rank)
        else:
            outcomes = [on_rank(rank)]
            if outcomes[0].kind == "failed":
                _pooled.release_peers()
    told = tuple((each.message, each.category, each.filename, each.lineno) for each in caught or ())
    records = tuple(map(_made.portable, item.handler.records))
    first = evolve(outcomes[0], warnings=_portable(told), records=records, log=item.handler.stream.getvalue())
    return [first, *outcomes[1:]]


def _portable(told: tuple[Any, ...]) -> tuple[Any, ...]:
    """Warnings that can travel; of others the text."""
    found = []
    for message, category, file, line in told:
        try:
            _results.pack_result((message, category), ())
            found.append((message, category, file, line))
        except Exception:
            found.append((str(message), UserWarning, file, line))
    return tuple(found)


def _returned(value: Any) -> Any:
    """What a function returns, of a coroutine what that does."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _called(call: Call, function: Callable[[], Any]) -> Outcome:
    import pytest

    try:
        value = function()
        if value is not None:
            return Outcome("passed", value=_results.pack_result(value, ()))
        return Outcome("passed")
    except (pytest.skip.Exception, pytest.xfail.Exception) as stop:
        kind = "xfailed" if isinstance(stop, pytest.xfail.Exception) else "skipped"
        return Outcome(kind, reason=str(stop), place=_place(_function.user_part(stop), call))
    except SystemExit as stop:
        if stop.code in (None, 0):
            return Outcome("passed")
        return Outcome("failed", failure=failure_of(call, stop))
    except BaseException as error:
        return Outcome("failed", failure=failure_of(call, error))


def failure_of(call: Call, error: BaseException) -> Failure:
    """*error*, with a look at it in the debugger where that is asked for."""
    error = error.with_traceback(_function.user_part(error))
    was_debugged = call.debug and _debugger.look_at(error)
    name, text = _report.qualified_name(type(error)), _report.text_of(error)
    file, line = _place(error.__traceback__, call)
    return Failure(
        error=_results.pack_exception(error, ()),
        kind=name,
        message=f"{name}: {text}" if text else name,
        file=file,
        line=line,
        representation=_represented(error, call),
        is_secondary=_report.is_secondary(error),
        was_debugged=was_debugged,
    )


def _place(trace: TracebackType | None, call: Call) -> tuple[str, int]:
    """The innermost line of the user's own code."""
    found = call.file, call.line
    while trace is not None:
        if not is_library(trace.tb_frame.f_code.co_filename):
            found = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return found


def _represented(error: BaseException, call: Call) -> Any:
    """Pytest's representation of *error*, as an item of its own would make it."""
    import pytest
    from _pytest._code import ExceptionInfo

    style: Style = call.style
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        return str(error)
    if error.__traceback__ is None:
        return _report.text_of(error)
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
    except Exception as failure:  # such as a class whose text cannot be had
        return f"{type(error).__name__}: (its traceback cannot be shown: {failure!r})"


def _shortened(info: Any, style: Style) -> Any:
    """The traceback without what pytest hides; of many frames the first and the last are shown whole."""
    from _pytest._code import Traceback

    frames = info.traceback.filter(info) or info.traceback
    if style.tbstyle == "auto" and len(frames) > 2:
        return Traceback((frames[0], *(each.with_repr_style("short") for each in frames[1:-1]), frames[-1]))
    return frames


@contextlib.contextmanager
def _patched(patches: tuple[Patch, ...]) -> Iterator[None]:
    """Have in this process what ``monkeypatch`` has changed in pytest's."""
    if not patches:
        yield
        return
    import pytest

    with pytest.MonkeyPatch.context() as here:
        for patch in patches:
            if patch.is_item and patch.is_gone:
                here.delitem(getattr(patch.owner, patch.name), patch.key, raising=False)
            elif patch.is_item:
                here.setitem(getattr(patch.owner, patch.name), patch.key, patch.value)
            elif patch.is_gone:
                here.delattr(patch.owner, patch.name, raising=False)
            else:
                here.setattr(patch.owner, patch.name, patch.value, raising=False)
        yield


def prepare(setting: _modules.Setting, modules: Mapping[str, _modules.Place], explains: tuple[str, ...]) -> None:
    """Before the first call that needs it: see `_modules.prepare`."""
    _modules.prepare(setting, modules)
    _modules.register(explains)
    _isolation.settle()


for _file in (__file__, _made.__file__, _coverage.__file__, _debugger.__file__, asyncio.runners.__file__):
    _function.OWN_FILES.add(_file)
