"""
The processes between launcher and workers: the fork server, and the spawner that forks workers,
watches and stops them.

Only these processes import from here, and the launcher if it forks workers itself
(``start_method="fork"``). Otherwise the launcher exchanges messages with them
(`workers/_launch.py`). It reads the kernel's facts (`_kernel_facts`) on its own.

Rules of this package: the standard library and elasticlib only. No thread, because it forks.
"""
