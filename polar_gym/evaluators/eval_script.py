"""Runs swebench's eval script as two commands: the lines that prepare the tests, then the tests under the witness.

The lines before the tests can run code of the harness as the user of the tests: `pip install -e .` executes the files
that `setup.py` reads. While they run, the sandbox holds neither the witness nor the copies of the hidden tests. When
the gateway has seen their end, the second command kills every process that is left, writes witness and tests, and goes
on with the shell's state. No script lies in a file, which could be rewritten: bash reads the whole of each from stdin
before it runs the first line.
"""

from __future__ import annotations

import base64
import dataclasses
import secrets
import shlex
import time
from collections.abc import Mapping

from polar_gym.evaluators.swebench_report import END, EXIT_CODE, START
from polar_gym.evaluators.witness import Witness, under_witness
from polar_gym.runtimes import Command, ExecResult, Sandbox

KILL_OTHERS = """
polar_gym_pid=$$ polar_gym_keep=" "
while [ "${polar_gym_pid:-0}" -gt 0 ]; do
    polar_gym_keep="$polar_gym_keep$polar_gym_pid "
    polar_gym_pid=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$polar_gym_pid/status")
done
for polar_gym_round in 1 2 3; do
    for polar_gym_each in /proc/[0-9]*; do
        polar_gym_each=${polar_gym_each#/proc/}
        case "$polar_gym_keep" in *" $polar_gym_each "*) ;; *) kill -9 "$polar_gym_each" 2> /dev/null ;; esac
    done
done
"""
"""Kills every process except the shell and its ancestors: one may be the tested code's, and change the tests."""

_TELL_STATE = '{ shopt -p; declare -p; declare -f; printf \'umask %s; cd %q\\n\' "$(umask)" "$PWD"; set +o; }'
"""Prints the commands that bring another bash into the state of this one, options last."""

_QUIETLY = "{ set +x; } 2> /dev/null"

_COPY = ">>>>> The tests would import an installed copy"
_BEFORE_COPIES = """
POLAR_GYM_ROOTS=$("$(command -v python || command -v python3)" {program} {workspace} {mark}) || :
export POLAR_GYM_ROOTS
"""
"""Has the tests import the workspace, even if the environment holds a copy of its packages."""


async def run(
    sandbox: Sandbox, script: str, workspace: str, texts: Mapping[str, bytes], witness: Witness, command: Command
) -> ExecResult:
    """Run a script with other texts of its test files, and return its output: stderr is in stdout.

    `texts`: path in the workspace -> content. `command` gives the environment and the time limit of the whole. A line
    after the tests prints the tests' exit code. Raises `SandboxError`.
    """
    begun, mark = time.monotonic(), secrets.token_hex(16)
    prepared = await sandbox.exec(_bash(command, preparing(script, mark)))
    log, found, state = prepared.stdout.rpartition(f"{mark}\n".encode())
    if prepared.timed_out or not found:
        return prepared
    left = max(1.0, command.timeout_seconds - (time.monotonic() - begun))
    testing_script = testing(script, workspace, texts, witness, state)
    tested = await sandbox.exec(_bash(dataclasses.replace(command, timeout_seconds=left), testing_script))
    return dataclasses.replace(tested, stdout=log + tested.stdout)


def preparing(script: str, mark: str) -> str:
    """Return the lines before the tests. After them the script prints the mark and the shell's state."""
    lines, _ = _parts(script)
    return _whole([_running(lines), _QUIETLY, KILL_OTHERS, f"echo; echo {mark}", f"{_TELL_STATE} 2> /dev/null"])


def testing(script: str, workspace: str, texts: Mapping[str, bytes], witness: Witness, state: bytes) -> str:
    """Return the script that runs the tests under the witness, in a state that a shell has told.

    The workspace goes before a copy that the environment has of its packages. The witness's key is written when no
    program runs any more that could import modules of the workspace.
    """
    program = f"{witness.directory}/polar_gym_copies.py"
    names = dict(zip(("program", "workspace", "mark"), map(shlex.quote, (program, workspace, _COPY)), strict=True))
    before = [KILL_OTHERS, f"mkdir {shlex.quote(witness.directory)} || exit"]
    before += [_writing(path, content) for path, content in witness.programs.items()]
    before += [f"{_evaluating(state)} 2> /dev/null", _BEFORE_COPIES.format(**names), KILL_OTHERS]
    before += [_writing(f"{workspace}/{file}", text) for file, text in texts.items()]
    before += [_writing(witness.key_file, witness.key), under_witness(witness.directory), "set -x"]
    lines = []
    for line in _parts(script)[1]:
        if END in line:
            lines += ["POLAR_GYM_EXIT_CODE=$?", line, f'echo "{EXIT_CODE}: $POLAR_GYM_EXIT_CODE"']
        else:
            lines.append(line)
    return _whole([*before, _running(lines)])


def tests_copy(log: str) -> bool:
    """Return whether a script's log says that its tests could not import the workspace."""
    return _COPY in log.partition(START)[0]


def _parts(script: str) -> tuple[list[str], list[str]]:
    """Return the lines before swebench's mark of the tests, and the lines from the mark on."""
    lines = script.strip().split("\n")  # not `splitlines`: a patch may hold any other line separator
    place = next(place for place, line in enumerate(lines) if START in line)
    return lines[:place], lines[place:]


def _whole(commands: list[str]) -> str:
    """Return a script that bash reads to its end before it runs the first command."""
    return "\n".join(["exec 2>&1", "{", *commands, "{ exit; } 2> /dev/null", "}", ""])


def _bash(command: Command, script: str) -> Command:
    return dataclasses.replace(command, argv=["bash", "-s"], stdin=script.encode())


def _running(lines: list[str]) -> str:
    return _evaluating("\n".join([*lines, ""]).encode())


def _evaluating(commands: bytes) -> str:
    """Return the command that parses and runs commands one by one, as bash does with a file."""
    return f'eval "$(base64 -d {_heredoc(commands)}\n)"'


def _writing(path: str, content: bytes) -> str:
    """Return the command that writes a file, or ends the script."""
    return f"base64 -d > {shlex.quote(path)} {_heredoc(content, '|| exit')}"


def _heredoc(content: bytes, rest: str = "") -> str:
    """Return base64 of a content as a command's input, with the rest of the command's line."""
    return f"<<'POLAR_GYM_END' {rest}\n{base64.encodebytes(content).decode()}POLAR_GYM_END"
