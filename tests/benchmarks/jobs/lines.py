"""A worker that writes as many lines as the command line says, each in two parts."""

import sys

from tests.benchmarks import state_log
from tests.benchmarks.lines import parts

state_log.mark("first")
for number in range(int(sys.argv[1])):
    for part in parts(state_log.rank(), number):
        sys.stdout.write(part)
        sys.stdout.flush()
