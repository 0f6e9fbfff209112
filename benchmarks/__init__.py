"""Benchmarks: cases in which this project and others take turns on one machine. `python -m benchmarks` is the command."""
