"""Runs at the start of every Python in a grading sandbox, before any file of the workspace can be imported.

In the first process that runs tests, two things happen. The runner's modules are imported now, so that no module of the
workspace can take their place. Then `polar_gym_witness` begins its record. A process that finds no key has no witness.
Any Python can parse this file; the witness begins from Python 3.5 on.

After that, and in every process, the workspace goes before copies of its packages (`polar_gym_copies`). PYTHONPATH
would put it before the standard library, and its modules could read the key.
"""

import os
import sys

LAUNCHERS = {b"pip", b"conda", b"mamba", b"poetry", b"pipenv", b"pdm", b"hatch", b"nox"}
# They run no tests themselves, whatever their arguments say, such as `conda activate testbed` and `poetry run pytest`.


def _program(words):
    """Return the name of the script or module that these words of a command line run, without a version."""
    for place, word in enumerate(words[1:], 2):
        if word == b"-m":
            return b"".join(words[place : place + 1])
        if not word.startswith(b"-"):
            return os.path.basename(word).rstrip(b"0123456789.")
    return b""


def _begin():
    directory = os.path.dirname(os.path.abspath(__file__))
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return
    if not any(b"test" in word for word in words[1:]) or _program(words) in LAUNCHERS:
        return
    path = os.path.join(directory, "key")
    try:
        with open(path, "rb") as file:
            key = file.read()
        os.unlink(path)
    except OSError:  # another process took the key
        return
    import polar_gym_witness

    polar_gym_witness.begin(key, os.path.join(directory, "record"))


if sys.version_info >= (3, 5):
    _begin()

roots = os.environ.get("POLAR_GYM_ROOTS")
if roots:
    packages = [place for place, path in enumerate(sys.path) if "-packages" in path]
    place = packages[0] if packages else len(sys.path)
    sys.path[place:place] = roots.split(os.pathsep)
