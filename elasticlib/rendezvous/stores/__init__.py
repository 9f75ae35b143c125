"""Stores that carry a job: in memory, torch's TCPStore and FileStore, and whatever can compare and set."""
