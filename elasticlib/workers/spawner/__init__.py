"""
The processes between launcher and workers: the fork server, and the spawner that forks workers, watches and stops them.

These processes alone import from here, and the launcher where it forks workers itself (``start_method="fork"``); else
it speaks with them in messages (`workers/_launch.py`). Rules of this package: the standard library and elasticlib only;
no thread, since it forks.
"""
