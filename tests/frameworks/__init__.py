"""
Frameworks on top: real jobs of two workers on CPU, each started as its users start it.

Rules of this room: a job of `jobs/` is a script such as a user of the framework writes; it imports nothing of
elasticlib or of the tests. Tests look at what was trained (weights, losses, the world that the framework saw), not
only at exit codes. Nothing is downloaded. A framework that is not installed skips its tests.

No job calls ``destroy_process_group``: with gloo, torch 2.13 can wait for itself for ever when the model wrapped in
DDP goes after it (the last owner of the group is then the model, freed with the interpreter locked).
"""
