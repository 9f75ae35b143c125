"""
The processes between launcher and workers: the fork server and the spawner that forks workers, watches and stops
them.
"""
