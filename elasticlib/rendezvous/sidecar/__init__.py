"""
The sidecar: a process beside the launcher that carries a node's rendezvous, and the launcher's
client of it.
"""
