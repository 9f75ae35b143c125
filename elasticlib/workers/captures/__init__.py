"""Captures of functions that are sent to the workers, each part by a name that its user knows."""
