"""Programs that the benchmarks launch: worker scripts and one that calls the Python interface."""
