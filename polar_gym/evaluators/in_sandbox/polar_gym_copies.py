"""Prints the directories of a workspace whose packages this Python has a copy of, for `sitecustomize`.

`pip install .` and `setup.py install` copy a package into the environment. The tests would import the image's copy. It
lacks the harness's changes, and no script in the sandbox may replace it. With these directories before those of
installed packages the tests import the workspace, as after `pip install -e .`.

A package cannot be tested in the workspace where only the copy has its compiled modules. The program tells such
packages on stderr, after its second argument. It imports none: no tested code is to run before the witness begins. It
runs on any Python.
"""

import os
import pkgutil
import sys


def main(workspace, mark):
    copies = _modules([path for path in sys.path if "-packages" in path])
    roots = []
    for root in (workspace, os.path.join(workspace, "src"), os.path.join(workspace, "lib")):
        copied = [name for name in _modules([root]) if name in copies]
        stuck = [name for name in copied if _compiled(copies[name], name) - _compiled(root, name)]
        if copied and not stuck:
            roots.append(root)
        for name in stuck:
            if not os.access(copies[name], os.W_OK):  # else the script may have installed the workspace anew
                sys.stderr.write("%s: %s\n" % (mark, name))
    sys.stdout.write(os.pathsep.join(roots))


def _modules(paths):
    """Return top-level module -> the first of the paths that holds it."""
    return {name: path for path in reversed(paths) for _, name, _ in pkgutil.iter_modules([path])}


def _compiled(path, name):
    """Return the compiled modules of a package, relative to its parent directory."""
    files = (os.path.join(at, file) for at, _, files in os.walk(os.path.join(path, name)) for file in files)
    return {os.path.relpath(file, path) for file in files if file.endswith(".so")}


if __name__ == "__main__":
    main(*sys.argv[1:])
