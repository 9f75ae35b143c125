"""The plugin's code in ranks: it runs the test's function with its fixtures, and finds leaks."""
