"""What the benchmarks launch: worker scripts and one program that calls the Python interface."""
