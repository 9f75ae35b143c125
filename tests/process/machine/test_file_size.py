"""A limit of a file's size is about the user's files: what goes between the launcher and its workers comes whole."""

from __future__ import annotations

import pytest

from tests.process.launches import run_python

pytestmark = pytest.mark.slow

WITHOUT_PRIVILEGE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 24, 0, 0, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""Runs a program that cannot raise its hard limit: without CAP_SYS_RESOURCE, where it had that."""
PROGRAM = """
import resource, sys
from elasticlib import ChildFailedError, LaunchConfig, elastic_launch, pool
from tests.process.machine import file_size

limits = {limits!r}
if {early!r}:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
config = LaunchConfig(nproc_per_node=2, preload=(), max_restarts=0, start_method={method!r})
elastic_launch(config, file_size.limits)()
resource.setrlimit(resource.RLIMIT_FSIZE, limits)

print(elastic_launch(config, file_size.limits)() == {{0: limits, 1: limits}})
print(file_size.is_right(elastic_launch(config, file_size.talks)(file_size.ARGUMENT)))
try:
    elastic_launch(config, file_size.fails)(file_size.ARGUMENT)
except ChildFailedError as error:
    print(len(str(error.__cause__)), error.__cause__.args[1] == file_size.ARGUMENT)
if {method!r} != "fork":
    print(file_size.stacks(config))
    with pool(2, group=None, preload=(), start_method={method!r}) as made:
        print(file_size.is_right(made.run(file_size.answer, file_size.ARGUMENT)))
print(resource.getrlimit(resource.RLIMIT_FSIZE) == limits)
"""
ALL = ["True", "True", "50000 True", "True", "True", "True"]


@pytest.mark.parametrize(
    ("limits", "early"),
    [((4096, -1), False), ((4096, 4096), False), ((4096, 4096), True)],
    ids=["soft", "hard", "hard from the beginning"],
)
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.sampled(0.3)
def test_results_reports_and_arguments_are_larger_than_files_may_be(
    method: str, limits: tuple[int, int], early: bool
) -> None:
    """Check that the worker has the caller's limit."""
    code = PROGRAM.format(limits=limits, method=method, early=early)

    done = run_python("-c", WITHOUT_PRIVILEGE, "-c", code)

    wanted = ALL if method != "fork" else [*ALL[:3], ALL[-1]]
    assert wanted == done.stdout.splitlines(), done.stderr
