"""Runs at the start of every Python in a grading sandbox, before any file of the workspace can be imported.

It does two things in the first process that runs tests. The runner's own modules are imported now, so that none in the
workspace can take their place. And `polar_gym_witness` begins its record. A process without the key has no witness.
Any Python can read this file; from 3.5 on it has an effect.
"""

import os
import sys


def _begin():
    directory = os.path.dirname(os.path.abspath(__file__))
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return
    if not any(b"test" in word for word in words[1:]) or any(word.endswith(b"pip") for word in words):
        return
    path = os.path.join(directory, "key")
    try:
        with open(path, "rb") as file:
            key = file.read()
        os.unlink(path)
    except OSError:  # another process has it
        return
    import polar_gym_witness

    polar_gym_witness.begin(key, os.path.join(directory, "record"))


if sys.version_info >= (3, 5):
    _begin()
