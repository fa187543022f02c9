"""Runs swebench's eval script as two commands: the lines that prepare the tests, then the tests under the witness.

The lines before the tests can run code of the harness as the user of the tests: `pip install -e .` executes the files
that `setup.py` reads. While they run, the sandbox holds neither the witness nor the tests that the gateway writes: the
script's test patch lacks these. When the gateway has seen the end of the lines, the second command kills every process
that is left, writes witness and tests, and goes on with the shell's state. No script lies in a file, which could be
rewritten: bash reads the whole of each from stdin before it runs the first line. The gateway's programs are
not looked up on the script's PATH.
"""

from __future__ import annotations

import base64
import dataclasses
import posixpath
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence

from polar_gym.evaluators import copies
from polar_gym.evaluators.patch import FileChange
from polar_gym.evaluators.swebench_report import END, EXIT_CODE, START
from polar_gym.evaluators.witness import Witness, under_witness
from polar_gym.runtimes import Command, ExecResult, Sandbox

KILL_OTHERS = """
polar_gym_flags=$- polar_gym_pid=$$ polar_gym_keep=" 1 "
set +f
while [ "${polar_gym_pid:-0}" -gt 0 ]; do
    polar_gym_keep="$polar_gym_keep$polar_gym_pid " polar_gym_above=
    while IFS=$' \t' read -r polar_gym_word polar_gym_rest; do
        [ "$polar_gym_word" != PPid: ] || polar_gym_above=$polar_gym_rest
    done < "/proc/$polar_gym_pid/status" || exit
    polar_gym_pid=$polar_gym_above
done
polar_gym_clean=0
while [ "$polar_gym_clean" -lt 2 ]; do
    polar_gym_clean=$((polar_gym_clean + 1)) polar_gym_seen=
    for polar_gym_each in /proc/[0-9]*; do
        polar_gym_each=${polar_gym_each#/proc/}
        [ "$polar_gym_each" != "$$" ] || polar_gym_seen=1
        case "$polar_gym_keep" in *" $polar_gym_each "*) continue ;; esac
        polar_gym_rest=
        { IFS= read -r -d '' polar_gym_rest < "/proc/$polar_gym_each/stat" || :; } 2> /dev/null
        [ "$polar_gym_rest" ] || continue
        case "${polar_gym_rest##*) }" in [ZX]*) continue ;; esac
        kill -9 "$polar_gym_each" 2> /dev/null && polar_gym_clean=0 || :
    done
    [ "$polar_gym_seen" ] || exit
done
case "$polar_gym_flags" in *f*) set -f ;; esac
"""
"""Kills every process of this user except the shell, its ancestors and the sandbox's first process: one may be the
tested code's, and change the tests. Goes on when two looks in a row found none. It runs no program, and ends the script
where it cannot see the shell itself: tested code may have taken the shell's limits."""

_TELL_STATE = (
    "{ echo 'unset $(compgen -e)'; shopt -p; declare -p; declare -f; alias -p; trap -p; "
    'printf \'umask %s; cd %q\\n\' "$(umask)" "$PWD"; set +o; }'
)
"""Prints the commands that bring another bash into the state of this one, options last."""

_QUIETLY = "{ set +x; } 2> /dev/null"


async def run(
    sandbox: Sandbox,
    script: str,
    test_patch: str,
    hidden: Sequence[FileChange],
    workspace: str,
    texts: Mapping[str, bytes],
    witness: Witness,
    command: Command,
    look: Callable[[], Awaitable[frozenset[str]]],
) -> tuple[ExecResult, frozenset[str]]:
    """Run a script with other texts of its test files. Return its output, with stderr in stdout, and what `look` saw
    before and after the lines before the tests, without what it saw both times.

    `texts`: path in the workspace -> content. `test_patch`: the patch that the script applies. `hidden`: its changes,
    without renames. `command` gives the environment and the time limit of the whole. A line after the tests prints the
    tests' exit code. Raises `SandboxError`.
    """
    begun, mark = time.monotonic(), secrets.token_hex(16)
    script = without_tests(script, test_patch, hidden, texts, _place_holder(mark))
    before = await look()
    prepared = await sandbox.exec(_bash(command, preparing(script, mark)))
    log, found, state = prepared.stdout.rpartition(f"{mark}\n".encode())
    if prepared.exit_code != 0 or not found:  # tested code that knows the mark may have killed the shell
        return prepared, frozenset()
    differing = before ^ await look()
    for forged in (START, END, copies.MARK):  # only the second command says these
        log = log.replace(forged.encode(), b"")
    left = max(1.0, command.timeout_seconds - (time.monotonic() - begun))
    testing_script = testing(script, workspace, texts, witness, state, mark)
    tested = await sandbox.exec(_bash(dataclasses.replace(command, timeout_seconds=left), testing_script))
    return dataclasses.replace(tested, stdout=log + tested.stdout), differing


def without_tests(
    script: str, test_patch: str, hidden: Sequence[FileChange], files: Container[str], place_holder: str
) -> str:
    """Return a script whose test patch does not change the files. Where nothing else is left, the patch makes an empty
    file, because git refuses an empty patch. A script that holds the patch in another form is returned as it is."""
    if not test_patch.strip():
        return script
    kept = b"".join(each.section for each in hidden if each.path.decode(errors="surrogateescape") not in files)
    kept = kept or f"diff --git a/{place_holder} b/{place_holder}\nnew file mode 100644\n".encode()
    # A binary file's part ends with an empty line.
    return script.replace(test_patch.strip("\n"), kept.decode(errors="surrogateescape").strip("\n") + "\n")


def preparing(script: str, mark: str) -> str:
    """Return the lines before the tests. After them the script prints the mark and the shell's state."""
    lines, _ = _parts(script)
    telling = [f"echo; echo {mark}", f"{_TELL_STATE} 2> /dev/null", "trap - EXIT ERR"]
    return _whole([_running(lines), _QUIETLY, KILL_OTHERS, *telling])


def testing(script: str, workspace: str, texts: Mapping[str, bytes], witness: Witness, state: bytes, mark: str) -> str:
    """Return the script that runs the tests under the witness, in a state that a shell has told.

    The workspace goes before a copy that the environment has of its packages. The witness is written when no program
    runs any more that could import modules of the workspace or of its environment.
    """
    before = [KILL_OTHERS, f"{_evaluating(state)} 2> /dev/null", _before_copies(workspace), KILL_OTHERS]
    before += [f"command -p rm -f {shlex.quote(f'{workspace}/{_place_holder(mark)}')}"]
    files = {**witness.programs, **{f"{workspace}/{file}": text for file, text in texts.items()}}
    before += [f"command -p mkdir -p {shlex.quote(path)} || exit" for path in sorted({*map(posixpath.dirname, files)})]
    before += [_writing(path, content) for path, content in files.items()]
    before += [_writing(witness.key_file, witness.key), under_witness(witness.directory)]
    lines = []
    for line in _parts(script)[1]:
        if END in line:
            lines += ["POLAR_GYM_EXIT_CODE=$?", line, f'echo "{EXIT_CODE}: $POLAR_GYM_EXIT_CODE"']
        else:
            lines.append(line)
    return _whole([*before, _running(["set -x", *lines])])


def tests_copy(log: str) -> bool:
    """Return whether a script's log says that its tests could not import the workspace."""
    return copies.MARK in log.partition(START)[0]


def _parts(script: str) -> tuple[list[str], list[str]]:
    """Return the lines before swebench's mark of the tests, and the lines from the mark on."""
    lines = script.strip().split("\n")  # not `splitlines`: a patch may hold any other line separator
    place = max(place for place, line in enumerate(lines) if START in line)  # a test patch may hold the mark, too
    return lines[:place], lines[place:]


def _whole(commands: list[str]) -> str:
    """Return a script that bash reads to its end before it runs the first command."""
    return "\n".join(["exec 2>&1", "{", *commands, "{ exit; } 2> /dev/null", "}", ""])


def _bash(command: Command, script: str) -> Command:
    return dataclasses.replace(command, argv=["bash", "-s"], stdin=script.encode())


def _running(lines: list[str]) -> str:
    return _evaluating("\n".join([*lines, ""]).encode(errors="surrogateescape"))


def _evaluating(commands: bytes) -> str:
    """Return the command that parses and runs commands one by one, as bash does with a file."""
    return f'eval "$(command -p base64 -d {_heredoc(commands)}\n)"'


def _before_copies(workspace: str) -> str:
    """Return the commands that have the tests import the workspace, even if the environment holds a copy of its
    packages."""
    python = f'| "$(command -v python || command -v python3)" - {shlex.quote(workspace)} {shlex.quote(copies.MARK)}'
    return f"{copies.ROOTS}=$(command -p base64 -d {_heredoc(copies.PROGRAM, python)}\n) || :\nexport {copies.ROOTS}"


def _writing(path: str, content: bytes) -> str:
    """Return the command that writes a file, or ends the script."""
    return f"command -p base64 -d >| {shlex.quote(path)} {_heredoc(content, '|| exit')}"


def _heredoc(content: bytes, rest: str = "") -> str:
    """Return base64 of a content as a command's input, with the rest of the command's line."""
    return f"<<'POLAR_GYM_END' {rest}\n{base64.encodebytes(content).decode()}POLAR_GYM_END"


def _place_holder(mark: str) -> str:
    return f".polar-gym-{mark[:16]}"
