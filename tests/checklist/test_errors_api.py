"""Rows 099 to 101: the error recorder and the error that tells of failed workers."""

from __future__ import annotations

import pytest

from tests.checklist.peers import Peer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]


@pytest.mark.row(99)
def test_an_exit_is_not_recorded_and_keeps_its_code(peer: Peer) -> None:
    """An exception, for comparison, is recorded."""
    done = peer.python(
        "import os, sys\n"
        "from {elastic}.multiprocessing.errors import record\n"
        "def fails():\n"
        "    raise ValueError('bad')\n"
        "os.environ['TORCHELASTIC_ERROR_FILE'] = 'exception.json'\n"
        "try:\n"
        "    record(fails)()\n"
        "except ValueError:\n"
        "    print('raised')\n"
        "os.environ['TORCHELASTIC_ERROR_FILE'] = 'exit.json'\n"
        "record(sys.exit)(0)\n"
        "print('went on')\n"
        "record(sys.exit)(3)\n"
        "print('never')\n"
    )

    assert (3, "raised\nwent on\n") == (done.returncode, done.out)
    assert ["exception.json", "program0.py"] == sorted(path.name for path in peer.folder.iterdir())


@pytest.mark.row(100)
def test_without_a_named_file_nothing_is_written_and_the_exception_goes_on(peer: Peer) -> None:
    done = peer.python(
        "import os\n"
        "from {elastic}.multiprocessing.errors import record\n"
        "def fails():\n"
        "    raise ValueError('bad')\n"
        "for value in (None, ''):\n"
        "    if value is not None:\n"
        "        os.environ['TORCHELASTIC_ERROR_FILE'] = value\n"
        "    try:\n"
        "        record(fails)()\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )

    assert (0, "bad\nbad\n") == (done.returncode, done.out)
    assert ["program0.py"] == [path.name for path in peer.folder.iterdir()]


@pytest.mark.row(101)
def test_an_error_of_failed_workers_without_a_failure_is_refused(peer: Peer) -> None:
    errors = peer.module("multiprocessing.errors")

    with pytest.raises(AssertionError):
        errors.ChildFailedError("train.py", {})
