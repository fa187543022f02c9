"""The environments are known to gymnasium, whichever of the two packages is imported first; in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAKE = (
    "name = {name!r}\n"
    "settings = dict(harness={{'name': 'command', 'command': 'true'}}, runtime='bubblewrap')\n"
    "print(type(gymnasium.make(name, **settings).unwrapped).__name__)\n"
    "print(type(gymnasium.make_vec(name, num_envs=2, **settings).unwrapped).__name__)\n"
)


@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("import polar_gym, gymnasium", "polar/swe"),
        ("import gymnasium, polar_gym", "polar/swe"),
        ("import gymnasium", "polar_gym:polar/swe"),
        ("import polar_gym.client, gymnasium.spaces, gymnasium", "polar/swe"),
    ],
)
def test_gymnasium_makes_the_environments(imports: str, name: str) -> None:
    program = f"{imports}\n{MAKE.format(name=name)}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=600
    )
    assert done.stdout.split() == ["SweEnv", "SweVectorEnv"]


def test_importing_the_package_again_registers_nothing_twice() -> None:
    """Guards against gymnasium's warning that an environment is replaced."""
    program = "import gymnasium, importlib, polar_gym\nimportlib.reload(polar_gym)\nprint(gymnasium.spec('polar/task'))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=600
    )
    assert "polar_gym.envs.task:TaskEnv" in done.stdout


WHILE_ANOTHER_THREAD_LOADS_GYMNASIUM = """
import sys, threading
from importlib.machinery import PathFinder

def import_polar_gym():
    import polar_gym

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "gymnasium.envs.registration":
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_meanwhile(module):
            other.start()
            other.join(timeout=2)  # the other thread waits for the registry
            load(module)

        spec.loader.exec_module = load_meanwhile
        return spec

other = threading.Thread(target=import_polar_gym)
sys.meta_path.insert(0, Finder())
import gymnasium
other.join()
print(gymnasium.spec("polar/swe").entry_point)
"""


def test_the_package_is_imported_while_another_thread_imports_gymnasium() -> None:
    """The registry is in `sys.modules` before it is loaded."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WHILE_ANOTHER_THREAD_LOADS_GYMNASIUM],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    assert done.stdout.split() == ["polar_gym.envs.swe:SweEnv"]
