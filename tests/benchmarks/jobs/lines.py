"""A worker that writes as many lines as the command line says, each in two parts."""

import sys

from tests.benchmarks import journal
from tests.benchmarks.lines import parts

journal.mark("first")
for number in range(int(sys.argv[1])):
    for part in parts(journal.rank(), number):
        sys.stdout.write(part)
        sys.stdout.flush()
