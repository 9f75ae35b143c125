"""
unittest test cases that run on every rank of warm workers.

    class TestMean(ElasticTestCase):
        world_size = 4

        def test_mean(self):
            dist.init_process_group("gloo", store=dist.FileStore(self.file_name, self.world_size),
                                    rank=self.rank, world_size=self.world_size)
            ...

The names are those of ``MultiProcessTestCase`` of ``torch.testing._internal``.

Rules of this file: the case in the tests' own process only calls the ranks and reports the outcome.
Under pytest, the plugin does this instead.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import sys
import tempfile
import unittest
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, Protocol

from elasticlib.testing.ranks import _cases, _failed, _meeting, _plain, _rank_options, _rank_session
from elasticlib.testing.ranks._failed import RanksFailed
from elasticlib.testing.ranks._gpu_count import gpus, missing_gpus
from elasticlib.testing.ranks._rank_call import RankCall
from elasticlib.testing.ranks._rank_options import RankOptions
from elasticlib.testing.ranks._refusal import why_not
from elasticlib.testing.ranks._test_report import TestReport

# unittest leaves frames of modules with this name out of its tracebacks.
__unittest = True

_HERE = -1
"""The rank of the tests' own process."""
_as_defined: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Attributes that the definition of each class has set."""


class ElasticTestCase(unittest.TestCase):
    """
    Test case that runs each test, with ``setUp``, ``tearDown`` and cleanups, on `world_size` ranks.

    ``class TestIt(ElasticTestCase, timeout=30, group="fresh")``: a test may take 30 seconds, and
    finds a process group. Options, with their defaults:

    * ``timeout`` (60): seconds that a test may take;
    * ``group`` (None: tests make their own): ``fresh``, ``shared`` or None;
    * ``backend`` (gloo);
    * ``device``: ``cuda`` if this machine has a GPU for each rank, else ``cpu``, which hides GPUs.
    """

    MAIN_PROCESS_RANK = _HERE
    rank: int = _HERE
    """Rank of this process, from 0 on; `MAIN_PROCESS_RANK` in the tests' own process."""
    file_name: str = ""
    """Path of an empty file that all ranks of this test share, for example for a ``FileStore``."""
    runs_on_ranks: ClassVar[bool] = True
    _options: ClassVar[Mapping[str, Any]] = {}
    _has_stopped = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()
        cls._options = {**cls._options, **options}
        if "nproc" in options:
            raise _rank_options.MarkError(
                f"class {cls.__qualname__}: use world_size={options['nproc']!r}; nproc is only for the elastic marker"
            )
        _checked(f"class {cls.__qualname__}", cls._options)
        _as_defined[cls] = dict(vars(cls))

    # Both spellings of the argument, as torch's own class accepts them.
    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        super().__init__(method_name if methodName == "runTest" else methodName)

    @property
    def world_size(self) -> int:
        """Number of ranks; a class can override it with a number or a property."""
        return 2

    # For suites that expect a new process for each test.

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """True if a process group that a test leaves is destroyed, not reported as a leak."""
        return True

    @property
    def is_master(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def _spawn_processes(self) -> None:
        """Do nothing: the ranks run already."""

    _fork_processes = _spawn_processes

    def _current_test_name(self) -> str:
        return self._testMethodName

    # Hooks that unittest calls for a test.

    @classmethod
    def makes_group(cls) -> bool:
        """Return whether tests make their process group themselves."""
        return cls._options.get("group") is None

    def _callSetUp(self) -> None:
        if self.rank != _HERE:
            super()._callSetUp()  # type: ignore[misc]

    def _callTestMethod(self, method: Callable[[], object]) -> None:
        # Here the test itself only calls the ranks, on which unittest runs the whole case.
        if self.rank == _HERE:
            self._on_ranks()
            return
        try:
            super()._callTestMethod(method)  # type: ignore[misc]
        except BaseException:
            self._has_stopped = True
            raise

    def _callTearDown(self) -> None:
        if self.rank != _HERE:
            # Another rank may still use what tearDown removes here, such as a file.
            _meeting.meet(has_stopped=self._has_stopped)
            super()._callTearDown()  # type: ignore[misc]

    def _on_ranks(self) -> None:
        kind, host = type(self), _host
        with tempfile.TemporaryDirectory(prefix="elasticlib-test-") as folder:
            file_name = os.path.join(folder, "file")
            with open(file_name, "xb"):
                pass
            result = host.run_case(
                self, wanted_by(self, host.limit), (kind, self._testMethodName, file_name, _attributes(kind))
            )

        first: BaseException | None = None
        for what, error in result.parts():
            if what is None:
                # The test itself failed: that is raised after the failures of subtests, as it ends this method.
                first = host.shown(error, result)
                continue
            message, parameters = what
            with self.subTest(*(() if message is None else (message,)), **parameters):
                raise host.shown(error, result) from None

        if first is not None:
            raise first from None
        if (stop := result.stop()) is not None:
            raise unittest.SkipTest(stop[0])

    # Comparisons, with the options of torch's own test suites.

    def assertEqual(
        self,
        first: Any,
        second: Any,
        msg: Any = None,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        equal_nan: bool = True,
        exact_dtype: bool = True,
        exact_device: bool = False,
    ) -> None:
        """
        Compare as unittest does.

        ``torch.testing.assert_close`` compares tensors, floats and values that contain them.
        """
        if not is_near(first, second):
            self._plainly_equal(first, second, msg)
            return
        options = {"atol": atol, "rtol": rtol, "equal_nan": equal_nan}
        options |= {"check_dtype": exact_dtype, "check_device": exact_device}
        check_equal(self, first, second, msg, options)

    def assertNotEqual(self, first: Any, second: Any, msg: Any = None, **options: Any) -> None:
        """
        Compare as unittest does.

        Tensors, floats and values that contain them differ if `assertEqual` would fail.
        """
        if not is_near(first, second):
            super().assertNotEqual(first, second, msg)
            return
        try:
            self.assertEqual(first, second, **options)
        except self.failureException:
            return
        raise self.failureException(self._formatMessage(msg, f"{first!r} == {second!r}"))

    def _plainly_equal(self, first: Any, second: Any, msg: Any) -> None:
        super().assertEqual(first, second, msg)


def known_backends() -> list[str]:
    """Return the backends that torch knows, also those of the program; [] if torch is not loaded."""
    dist: Any = sys.modules.get("torch.distributed")
    return list(getattr(getattr(dist, "Backend", None), "backend_list", ()))


def _checked(where: str, options: Mapping[str, Any], size: int = 1) -> RankOptions:
    return _rank_options.checked_options(where, RankOptions(nproc=size, group=None), options, known_backends())


def wanted_by(case: ElasticTestCase, limit: float) -> RankOptions:
    """
    Return the options of the ranks of *case*; *limit* is its timeout in seconds if it sets none.

    Raises `MarkError`, and ``unittest.SkipTest`` if GPUs are missing.
    """
    options = {"timeout": limit, **case._options}
    size: Any = case.world_size
    where = f"world_size of {case.id()}"
    _rank_options.sizes(where, size)

    # NCCL needs GPUs: without enough of them the test is skipped, not moved to CPUs.
    says_device = "device" in options or "nccl" in options.get("backend", "")
    if not says_device:
        options["device"] = "cuda" if gpus() >= size else "cpu"
    wanted = _checked(where, options, size)
    if why := missing_gpus(wanted, "world_size"):
        raise unittest.SkipTest(why)

    return wanted


def _attributes(kind: type) -> dict[str, Any]:
    """Return the attributes that *kind* has got since its definition, for example by ``setUpClass``."""
    found: dict[str, Any] = {}
    for name, value in vars(kind).items():
        is_new = _as_defined[kind].get(name, _as_defined) is not value
        is_method = isinstance(value, (FunctionType, property, classmethod, staticmethod))
        if is_new and not is_method and not name.startswith(("__", "_class")):
            # What cannot be sent is an error only where a test reads it.
            why = why_not(value)
            found[name] = _cases.Missing(name, type(value).__qualname__, why) if why else value
    return found


class RankHost(Protocol):
    """Interface to the framework that runs tests on ranks and shows their outcomes."""

    @property
    def limit(self) -> float:
        """Timeout in seconds of tests that set none."""

    def run_case(self, case: ElasticTestCase, wanted: RankOptions, args: tuple[Any, ...]) -> TestReport:
        """Run `_cases.run_case` with *args* on the ranks of *wanted*."""

    def shown(self, error: RanksFailed, result: TestReport) -> BaseException:
        """Return the exception to raise for *error*."""


class _Plain:
    """Host of tests that unittest runs."""

    def __init__(self) -> None:
        self.limit = RankOptions().timeout
        self._ranks: _rank_session.Ranks | None = None

    def run_case(self, case: ElasticTestCase, wanted: RankOptions, args: tuple[Any, ...]) -> TestReport:
        if self._ranks is None:
            self._ranks = _rank_session.Ranks(_plain.UnittestWork(), lambda wanted: ())
        code = getattr(getattr(type(case), case._testMethodName), "__code__", None)
        call = RankCall(
            test=case.id(),
            file="" if code is None else code.co_filename,
            line=0 if code is None else code.co_firstlineno,
            # Equal in each run, unlike Python's hash of a text.
            seed=zlib.crc32(case.id().encode()),
        )
        try:
            result = self._ranks.run(wanted, call, _cases.run_case, args, {}, (sys.modules[type(case).__module__],))
        except KeyboardInterrupt:
            print(*self._ranks.interrupted, sep="\n", file=sys.stderr)
            ranks, self._ranks = self._ranks, None
            ranks.close(hurry=True)
            raise

        if (leaks := result.leaks_warning(call)) is not None:
            warnings.warn_explicit(leaks, None, call.file, call.line)
        return result

    def shown(self, error: RanksFailed, result: TestReport) -> BaseException:
        parts = [_failed.text(error)]
        for rank, text in sorted(result.output.items()):
            # The output of rank 0 has been shown already.
            if rank > 0 and text.strip():
                parts.append(f"output of rank {rank}:\n{text.rstrip()}")
        is_failure = isinstance(error, AssertionError)
        found: Any = (_FailedError if is_failure else _EndedError)("\n\n".join(parts))
        found.failures = error.failures
        return found  # type: ignore[no-any-return]


class _FailedError(AssertionError):
    pass


class _EndedError(Exception):
    pass


for _kind in (_FailedError, _EndedError):
    _kind.__name__ = _kind.__qualname__ = "RanksFailed"
    _kind.__module__ = "elasticlib.testing"

_host: RankHost = _Plain()


@contextlib.contextmanager
def hosted(host: RankHost) -> Iterator[None]:
    """Let *host* run the tests within the block."""
    global _host
    former, _host = _host, host
    try:
        yield
    finally:
        _host = former


# Equality of values that contain tensors, by ``torch.testing.assert_close``. torch is used only if the
# program has imported it. unittest compares values that contain neither tensors nor floats.


def is_near(*values: Any) -> bool:
    """Return whether one of *values* is or contains a tensor, float or complex number."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and any(_has_near(value, torch) for value in values)


def _has_near(value: Any, torch: Any) -> bool:
    if isinstance(value, (torch.Tensor, float, complex)):
        return True
    if isinstance(value, Mapping):
        return any(_has_near(each, torch) for each in value.values())
    return isinstance(value, (list, tuple)) and any(_has_near(each, torch) for each in value)


def check_equal(case: Any, first: Any, second: Any, msg: Any, options: Mapping[str, Any], at: str = "") -> None:
    """Raise ``AssertionError`` unless both are equal; *at* is their path in the compared values."""
    # Item by item, so that the error names the place of the difference.
    if _are_like_mappings(first, second) or _are_like_lists(first, second):
        for key, one, other in _pairs(first, second):
            check_equal(case, one, other, msg, options, f"{at}[{key!r}]")
        return

    torch: Any = sys.modules["torch"]
    first, second = _alike(first, second, torch), _alike(second, first, torch)
    if _are_near_kinds(first, second, torch):
        _check_near(case, first, second, msg, options, at)
    elif at:
        case._plainly_equal(first, second, f"{msg or ''} (at {at})".strip())
    else:
        case._plainly_equal(first, second, msg)


def _pairs(first: Any, second: Any) -> Iterator[tuple[Any, Any, Any]]:
    keys = first if isinstance(first, Mapping) else range(len(first))
    for key in keys:
        yield key, first[key], second[key]


def _check_near(case: Any, first: Any, second: Any, msg: Any, options: Mapping[str, Any], at: str) -> None:
    torch: Any = sys.modules["torch"]
    are_tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)

    # A number has no dtype to compare.
    if not are_tensors:
        options = {**options, "check_dtype": False}
    try:
        torch.testing.assert_close(first, second, **options)
    except (AssertionError, TypeError) as error:
        # TypeError: a number was compared with a tensor of many elements.
        text = f"{error}\n(at {at})" if at else str(error)
        raise case.failureException(case._formatMessage(msg, text)) from None


def _are_like_mappings(first: Any, second: Any) -> bool:
    are_mappings = isinstance(first, Mapping) and isinstance(second, Mapping)
    return are_mappings and first.keys() == second.keys()


def _are_like_lists(first: Any, second: Any) -> bool:
    are_lists = isinstance(first, (list, tuple)) and isinstance(second, (list, tuple))
    return are_lists and type(first) is type(second) and len(first) == len(second)


def _are_near_kinds(first: Any, second: Any, torch: Any) -> bool:
    kinds = (torch.Tensor, numbers.Number)
    return isinstance(first, kinds) and isinstance(second, kinds)


def _alike(value: Any, other: Any, torch: Any) -> Any:
    """Return *value* converted for a comparison with *other*, which may be a tensor."""
    if isinstance(value, torch.Tensor):
        # Compare a tensor of one element with a number as a number.
        is_number = isinstance(other, numbers.Number) and value.numel() == 1
        return value.item() if is_number else value
    if not isinstance(other, torch.Tensor) or isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return torch.as_tensor(value, dtype=other.dtype, device=other.device)
    return value
