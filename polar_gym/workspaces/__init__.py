"""Workspaces: the directory that an agent works in, before the agent and after.

- `repository`: a task's files become a git repository whose history ends at the base commit.
- `shared`: one such repository for all sessions that begin from the same files.
- `history`: the same for the repository that an image brings along.
- `diff`: the changes of an agent as a git patch, and their way into another sandbox.
- `venv`: the virtual environment with a task's packages.
- `requirements`: which packages a task may ask for.

The room uses `runtimes`, in whose sandboxes git runs, and `schema`. It has no plug-ins.
"""
