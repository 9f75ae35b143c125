"""A worker with a child in a session of its own; both would sleep for longer than any round lasts."""

import signal
import subprocess

from tests.benchmarks import journal

subprocess.Popen(["sleep", "600"], start_new_session=True)
journal.mark("up")
signal.pause()
