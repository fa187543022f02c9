"""Have node load a script before the harness, and with it run harnesses for less CPU time and memory."""

from __future__ import annotations

import dataclasses

from polar_gym.harnesses import Launch, LaunchContext

_FRUGAL = """\
// Loaded before the harness, which does the same as without this script, for less CPU time and memory.
// V8's baseline compiler is enough for a grammar that parses some commands. Node 24 waits for no other at its end.
require('node:v8').setFlagsFromString('--liftoff-only');
// A bundle copies all properties of a module, of which it reads one: `default`. Bytes are a property each.
const names = Object.getOwnPropertyNames;
Object.getOwnPropertyNames = (value) => (value instanceof Uint8Array && value.length > 99_999 ? [] : names(value));
"""


def loading_first(launch: Launch, path: str, script: str) -> Launch:
    """Return the launch with a script, at this path of the sandbox, that node loads first. argv begins with node."""
    node, *rest = launch.argv
    return dataclasses.replace(launch, argv=[node, "--require", path, *rest], files={**launch.files, path: script})


def frugal(launch: Launch, context: LaunchContext) -> Launch:
    """Return the launch of a harness that reads shell commands by tree-sitter's grammar of bash, made cheap.

    The grammar is a WebAssembly module of 1.4 MB. Node 20 optimises it, and does not end before that is done. Qwen Code
    0.15.10 also makes a property of each of its bytes. `make bench ARGS=harness_cost` measures both.
    """
    return loading_first(launch, f"{context.home}/.polar-gym/frugal.cjs", _FRUGAL)
