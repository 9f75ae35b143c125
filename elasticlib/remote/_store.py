"""
The rendezvous of an engine's jobs: ``python -m elasticlib.remote._store``, started by an engine on one machine.

It reads the token of the jobs, a line on its standard input, and writes the endpoint, a line on its standard output.
The end of the input ends it.
"""

from __future__ import annotations

import argparse
import os
import sys

from elasticlib.rendezvous import serve


def main() -> None:
    """Serve jobs until the end of the input."""
    parser = argparse.ArgumentParser(prog="python -m elasticlib.remote._store")
    parser.add_argument("--address", default="")
    options = parser.parse_args()

    token = sys.stdin.readline().strip()
    with serve(0, options.address, token=token) as endpoint:
        # One write: the engine takes what arrives first.
        os.write(sys.stdout.fileno(), f"{endpoint}\n".encode())
        sys.stdin.read()


if __name__ == "__main__":
    main()
