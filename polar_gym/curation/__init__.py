"""Making tasks, and proving that a task means what it says.

A task is worth having when its reference solution resolves it and doing nothing does not, every time. `bench` grades
patches in sandboxes, as a rollout would; `validation` holds a task against that; `from_pypi` makes tasks out of two
releases of a package (`pypi` fetches them, `releases` compares them, `issue` writes the instruction). `prepare` makes
rows of SWE-bench, SWE-Gym and SWE-smith say how they are graded (`swebench_specs` asks swebench 4, `pytest_script`
writes a script, `reverse` turns a patch round).
"""
