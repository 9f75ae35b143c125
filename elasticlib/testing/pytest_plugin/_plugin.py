"""
The plugin of a session with tests on ranks: it calls the ranks and reports their outcomes.

Rules of this file: only the call of a test's function is replaced; pytest does everything else.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import pytest
from attrs import evolve

from elasticlib._clock import monotonic
from elasticlib.job import Place, Results
from elasticlib.rendezvous import host_name
from elasticlib.stacks import ranks_text
from elasticlib.testing import _case
from elasticlib.testing.process_state import _torch_modes
from elasticlib.testing.pytest_plugin import _examples, _markers, _reports, _travel
from elasticlib.testing.pytest_plugin.rank import _run
from elasticlib.testing.ranks import _cases, _rank_options, _rank_session
from elasticlib.testing.ranks._coverage import Measuring
from elasticlib.testing.ranks._failed import RanksFailed
from elasticlib.testing.ranks._gpu_count import missing_gpus
from elasticlib.testing.ranks._rank_call import MADE, RankCall, Style
from elasticlib.testing.ranks._rank_options import RankOptions
from elasticlib.testing.ranks._refusal import CannotTravelError
from elasticlib.testing.ranks._test_report import TestReport


class Plugin:
    """Hooks of a session with tests on ranks, in addition to those of the package."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ranks: _rank_session.Ranks | None = None
        self._item: Any = None
        self._problem: BaseException | None = None
        self._measuring = Measuring(config)
        self.fixture = Elastic(self)
        self._calls = 0
        _travel.watch_patches()
        _enter_failures_on_ranks(config)

    @property
    def ranks(self) -> _rank_session.Ranks:
        if self._ranks is None:
            self._ranks = _rank_session.Ranks(_travel.PytestWork(self._config), self._terminal)
        return self._ranks

    # Running a test.

    def begin(self, item: Any) -> None:
        """Register the running test *item*, which has just asked for ranks."""
        self._item = item

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Start and prepare the ranks before the test's time begins."""
        self._item, self._problem = item, None
        names = getattr(item, "fixturenames", ())
        case = _markers.case_of(item)
        if case is not None or item.get_closest_marker("elastic") is not None or "elastic" in names:
            try:
                wanted = _markers.wanted_by(item) if case is None else _case.wanted_by(case(item.name), self.limit)
                # Without enough GPUs the test is skipped in its setup, and needs no ranks.
                if not missing_gpus(wanted):
                    with _capturing(self._config, item):
                        self.ranks.warm(wanted, self._modules(item))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # The setup of the test raises it, so that pytest reports it with the test.
                self._problem = error

        try:
            with _case.hosted(self):
                return (yield)
        finally:
            self._item = None

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        is_marked = item.get_closest_marker("elastic") is not None
        if self._problem is not None and (is_marked or _markers.case_of(item)):
            problem, self._problem = self._problem, None
            # Its frames are those of this plugin, which explain nothing.
            raise problem.with_traceback(None)

        if not is_marked:
            return

        wanted = _markers.wanted_by(item)
        is_unittest = not hasattr(item, "pyfuncitem") and getattr(item, "_testcase", None) is not None
        if is_unittest:
            raise pytest.UsageError(
                f"{item.nodeid} is a unittest test: derive its class from ElasticTestCase instead of using a marker"
            )

        _skip_without_gpus(wanted)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        __tracebackhide__ = True
        if not _markers.runs_on_ranks(pyfuncitem):
            return None

        wanted, function = _markers.wanted_by(pyfuncitem), _markers.written(pyfuncitem.obj)
        kwargs = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        _examples.stop_allowing(pyfuncitem)
        if (engine := getattr(function, "hypothesis", None)) is None:
            self.call(wanted, function, (), kwargs)
            return True

        # Hypothesis calls the inner test once for each example.
        inner = _markers.written(engine.inner_test)
        with _examples.on_ranks(engine, lambda args, given: self.call(wanted, inner, args, given)):
            function(**kwargs)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Exempt the fixtures that each rank makes from Hypothesis's health checks."""
        if item.get_closest_marker("elastic") is not None:
            _examples.allow_made(item)
        return (yield)

    def call(
        self,
        wanted: RankOptions,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_body: bool = True,
    ) -> Results:
        """Run *function* on the ranks of *wanted*; return its results or raise the test's error."""
        __tracebackhide__ = True
        item = self._item
        made = tuple(name for name, value in kwargs.items() if _is_made_on_rank(name, value))
        sent = {name: value for name, value in kwargs.items() if name not in made}
        self._calls += 1
        modules = self._modules(item)
        began = monotonic()

        # The previous call or Hypothesis example may have stopped the ranks.
        self.ranks.warm(wanted, modules)
        _examples.leave_out(monotonic() - began)
        try:
            call = self._new_call(item, wanted, function, made)
            trace = is_body and bool(self._config.getoption("trace", False))
            call = evolve(call, is_body=is_body, trace=trace)
            result = self.ranks.run(wanted, call, function, args, sent, modules)
        except CannotTravelError as refusal:
            if is_body:
                raise pytest.fail.Exception(str(refusal), pytrace=False) from None
            raise refusal.with_traceback(None) from None

        _reports.forward(item, call, result, self._measuring)
        if result.error is not None:
            raise self.shown(result.error, result)

        if (stop := result.stop()) is not None:
            reason, outcome = stop
            if outcome.kind == "xfailed":
                pytest.xfail(reason)
            item.stash[_reports.SKIPPED] = (*outcome.place, f"Skipped: {reason}")
            raise pytest.skip.Exception(reason, _use_item_location=True)

        values = {rank: _rank_session.value_of(each) for rank, each in sorted(result.outcomes.items())}
        return Results(values, dict.fromkeys(values, Place(0, host_name(), self._calls - 1, 0)))

    # For unittest cases: see `_case.RankHost`.

    @property
    def limit(self) -> float:
        """Timeout in seconds of tests that set none."""
        return _markers.defaults(self._config).timeout

    def run_case(self, case: _case.ElasticTestCase, wanted: RankOptions, args: tuple[Any, ...]) -> TestReport:
        item = self._item
        call = evolve(self._new_call(item, wanted, getattr(type(case), case._testMethodName), ()), device="cpu")
        try:
            result = self.ranks.run(wanted, call, _cases.run_case, args, {}, self._modules(item))
        except CannotTravelError as refusal:
            raise refusal.with_traceback(None) from None
        _reports.forward(item, call, result, self._measuring)
        return result

    def shown(self, error: RanksFailed, result: TestReport) -> RanksFailed:
        _reports.note(self._item, result)
        return error

    def _new_call(
        self, item: Any, wanted: RankOptions, function: Callable[..., Any], made: tuple[str, ...]
    ) -> RankCall:
        config, option = self._config, self._config.option
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)

        # The same seed in each run and in any order of tests; pytest-randomly may change it.
        seed = zlib.crc32(item.nodeid.encode()) ^ int(getattr(option, "randomly_seed", None) or 0) & 0xFFFFFFFF
        return RankCall(
            test=item.nodeid,
            file=str(item.path) if code is None else code.co_filename,
            line=0 if code is None else code.co_firstlineno,
            seed=seed,
            device=wanted.device,
            made=made,
            style=_style(config),
            patches=_travel.patches(),
            filters=_travel.filters(),
            levels=_travel.levels(getattr(item, "funcargs", {}).get("caplog")),
            modes=_torch_modes.now(),
            config=_travel.config(),
            log_disabled=logging.root.manager.disable,
            log_format=(_ini(config, "log_format"), _ini(config, "log_date_format")),
            debug=bool(config.getoption("usepdb", False)),
            checks=bool(config.getini("elastic_checks")),
            has_own_group=wanted.group == "fresh",
            example=_examples.example(),
            coverage=self._measuring.settings(),
            context=self._measuring.context(item.nodeid),
        )

    def _modules(self, item: Any) -> list[Any]:
        module = getattr(item, "module", None)
        return [] if module is None else [module]

    # Reports.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        info = call.excinfo
        is_shown = report.longrepr is not None and not report.skipped
        if is_shown and info is not None and isinstance(info.value, RanksFailed):
            report.longrepr = _reports.representation(info.value, _reports.callers_of(item, info))
        if call.when == "call":
            _reports.add_kept(report, item)
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._ranks is not None and self._ranks.interrupted:
            terminalreporter.section("ranks when pytest was interrupted")
            for line in self._ranks.interrupted:
                terminalreporter.write_line(line)

    # Coverage.

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Add the ranks' coverage data after the tests, before the measurement is written."""
        try:
            return (yield)
        finally:
            self._measuring.write()

    # The end.

    def pytest_keyboard_interrupt(self) -> None:
        if self._ranks is not None:
            self._ranks.close(hurry=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._ranks is not None:
            self._ranks.close(hurry=False)

    def _terminal(self, wanted: bool) -> Sequence[int]:
        """Stop pytest's capturing if *wanted*, and return the terminal's descriptors; else capture again."""
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        if not wanted:
            capture.resume()
            return ()
        capture.suspend(in_=True)
        return 0, 1


def _is_made_on_rank(name: str, value: object) -> bool:
    """Return True for an argument that each rank makes itself: its own rank or device, or a fixture of pytest."""
    is_of_pytest = name in MADE and getattr(value, "__module__", "").startswith("_pytest.")
    return is_of_pytest or isinstance(value, _markers.Made)


class Elastic:
    """Value of the fixture ``elastic``."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def __call__(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        nproc: int | None = None,
        backend: str | None = None,
        timeout: float | None = None,
        group: Any = "",
        device: str | None = None,
        **kwargs: Any,
    ) -> Results:
        """
        Call *function* on *nproc* ranks with these arguments and return {rank: result}.

        Raises `RanksFailed` if ranks raised, died, or have not ended after *timeout* seconds, and
        `MarkError` for invalid options.
        """
        __tracebackhide__ = True
        plugin = self._plugin
        if plugin._item is None:
            raise RuntimeError("elastic(...) can be called only while a test runs")

        options: dict[str, Any] = {"nproc": nproc, "backend": backend, "timeout": timeout, "device": device}
        given = {name: value for name, value in options.items() if value is not None}

        # None is a valid group, so the default is another value.
        if group != "":
            given["group"] = group
        wanted = _rank_options.checked_options(
            "elastic(...)", _markers.wanted_by(plugin._item), given, _case.known_backends()
        )
        _skip_without_gpus(wanted)
        return plugin.call(wanted, function, args, kwargs, is_body=False)

    def spawn(
        self, function: Callable[..., Any], nprocs: int | None = None, args: Sequence[Any] = (), **options: Any
    ) -> Results:
        """
        Call ``function(rank, *args)`` on *nprocs* ranks, as ``torch.multiprocessing.spawn`` does.

        Return {rank: result}. The function makes its own process group unless ``group=`` asks for
        one. *options* are ``backend``, ``timeout``, ``group`` and ``device``, as in a call of this
        fixture.
        """
        __tracebackhide__ = True
        return self(_run.with_rank, function, *args, **{"nproc": nprocs, "group": None, **options})

    @property
    def pool(self) -> Any:
        """`elasticlib.Pool` with the default number of ranks."""
        return self._plugin.ranks.pool(_markers.wanted_by(self._plugin._item))

    def __repr__(self) -> str:
        return "<elastic: calls a function on ranks>"


@contextlib.contextmanager
def _capturing(config: Any, item: pytest.Item) -> Iterator[None]:
    """Capture output within the block, such as that of imports, as output of *item*'s setup."""
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    if capture is None:
        yield
        return

    capture.resume_global_capture()
    try:
        yield
    finally:
        capture.suspend_global_capture(in_=False)
        for stream, text in zip(("stdout", "stderr"), capture.read_global_capture(), strict=True):
            if text:
                item.add_report_section("setup", stream, text)


def _skip_without_gpus(wanted: RankOptions) -> None:
    if why := missing_gpus(wanted):
        pytest.skip(why)


def _style(config: Any) -> Style:
    return Style(
        tbstyle=config.getoption("tbstyle", "auto"),
        showlocals=bool(config.getoption("showlocals", False)),
        fulltrace=bool(config.getoption("fulltrace", False)),
        verbosity=config.get_verbosity(),
        directory=str(config.invocation_params.dir),
    )


def _ini(config: Any, name: str) -> str:
    with contextlib.suppress(KeyError, ValueError):
        return str(config.getoption(name, None) or config.getini(name) or "")
    return ""


# Debugging of failures on ranks with ``pytest --pdb``. Pytest chooses the failures to debug.

_DEBUGGER = "pdbinvoke"
"""Name of pytest's own debugger plugin."""


def _enter_failures_on_ranks(config: pytest.Config) -> None:
    former = config.pluginmanager.get_plugin(_DEBUGGER)
    if former is not None:
        config.pluginmanager.unregister(former)
        config.pluginmanager.register(_Interact(former), _DEBUGGER)


class _Interact:
    """Replacement for pytest's debugger plugin, which enters failures on their ranks."""

    def __init__(self, former: Any) -> None:
        self._former = former

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        error = call.excinfo.value
        if not isinstance(error, RanksFailed):
            self._former.pytest_exception_interact(node, call, report)
            return

        capture: Any = node.config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        terminal = node.config.pluginmanager.get_plugin("terminalreporter")._tw
        terminal.line()
        terminal.sep(">", "traceback")
        report.toterminal(terminal)
        terminal.sep(">", f"entering PDB on {ranks_text([error.root])}")
        terminal.flush()
        quits = error.look(error.root)
        if quits is None:
            terminal.line(f"{ranks_text([error.root])} has exited: there is nothing to debug")
        elif quits:
            pytest.exit("Quitting debugger")

    def pytest_internalerror(self, excinfo: Any) -> None:
        self._former.pytest_internalerror(excinfo)
