"""Every performance claim of the project, as a command: `python -m benchmarks` measures, and writes one report."""
