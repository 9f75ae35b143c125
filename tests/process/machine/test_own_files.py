"""A worker's own files hold what it wrote there, also after it closed every descriptor that it found."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch
from elasticlib.workers.child._child import STACKS_SIGNAL

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

FILES = 100


def crash_with_own_files(folder: str) -> NoReturn:
    """Close what was inherited, as a daemon does, take the same numbers for files, have stacks written, and crash."""
    os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), 4096))
    for number in range(FILES):
        os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT)
    signal.raise_signal(STACKS_SIGNAL)
    ctypes.string_at(0)
    raise AssertionError("nothing is at this address")


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_crash_writes_into_no_file_of_the_worker(method: str, tmp_path: Path) -> None:
    """Its stacks still are in the report."""
    config = LaunchConfig(nproc_per_node=1, max_restarts=0, start_method=method)  # type: ignore[arg-type]

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, crash_with_own_files)(str(tmp_path))

    assert [0] * FILES == [file.stat().st_size for file in tmp_path.iterdir()]
    (failure,) = caught.value.failures.values()
    assert failure.exitcode == -signal.SIGSEGV
    assert "crash_with_own_files" in failure.traceback
