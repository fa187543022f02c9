"""Makes tasks, validates and audits them.

A task is valid if its reference solution resolves it and an empty change does not, every time.

- `bench`: grades patches in sandboxes, as a rollout would;
- `validation`: grades a task's reference solution and a change that does nothing;
- `solution`: writes a reference solution as the diff of a harness that made the same changes;
- `audit`: measures how often a task rewards a wrong patch. `wrong` makes the patches (with `cheats`), `trial` runs the
  tests on many patches in one sandbox. `equivalence` compares two patches by altered tests. `leaks` looks for the
  solution in the sandbox;
- `twins`: finds the places at which hidden tests can be altered; `alone` makes tests with one assertion;
- `from_pypi`: makes a task out of two releases of a package. `pypi` fetches the releases, `issue` writes the
  instruction;
- `from_git`: makes tasks out of the commits of a repository. `declared` reads what its tests need, `statement` writes
  the instruction;
- `making`: makes a task out of the sources before and after a change, for both. `releases` compares the sources,
  `pins` pins what tests need, `git` runs git;
- `prepare`: adds the way of grading to rows of SWE-bench, SWE-Gym and SWE-smith. `swebench_specs` asks swebench 4 (by
  the program `swebench_4`), `pytest_script` writes a script, `reverse` reverses a patch;
The room uses evaluators, tasks, workspaces, runtimes and schema.
"""

from __future__ import annotations

from polar_gym.errors import ConfigError


class CurationError(ConfigError):
    """The input does not make a task, or the task cannot be audited. The message says why, and what to try instead."""
