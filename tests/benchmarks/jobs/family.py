"""A worker with a child in a session of its own; both would sleep for longer than any round lasts."""

import signal
import subprocess

from tests.benchmarks import state_log

subprocess.Popen(["sleep", "600"], start_new_session=True)
state_log.mark("up")
signal.pause()
