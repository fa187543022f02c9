"""Measures every performance claim of the project: `python -m benchmarks` writes one report."""
