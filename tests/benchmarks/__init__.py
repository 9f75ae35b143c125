"""
The promises, measured: each figure for elasticlib and for torchrun, in turns, in one run.

``python -m tests.benchmarks`` (from the repository's root) prints the table; ``--json FILE`` keeps every single
value. Some campaigns have commands of their own: ``python -m tests.benchmarks.recoveries``, ``...kills``,
``...forming``, ``...schedules``, ``...adversary`` and ``...planted_faults``.

Rules of the house: the two launchers take turns (A B A B), so that a busy machine hurts both; times are
``time.monotonic()``, which all processes of one Linux host share; a room waits for a condition with a time limit;
whatever a job leaves behind is found by its mark and killed, one process at a time.
"""
