"""
Stores that carry a job: in memory, torch's TCPStore and FileStore, and any store with compare and
set.
"""
