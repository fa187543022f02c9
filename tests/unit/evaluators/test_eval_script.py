"""swebench's eval script, run as two commands."""

from __future__ import annotations

import asyncio
import secrets
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from polar_gym.evaluators import eval_script
from polar_gym.evaluators.patch import file_changes
from polar_gym.evaluators.swebench_report import END, START
from polar_gym.evaluators.witness import Witness
from polar_gym.runtimes import Command, ExecResult
from tests.support.requirements import need_bubblewrap

SCRIPT = f"""\
set -u
cat > patch <<'END_OF_PATCH'
{{}}
END_OF_PATCH
echo "${{{{PYTHONPATH-}}}}" > before
{{}}
: '{START}'
echo "$PYTHONPATH" > during
{{}}
false
: '{END}'
"""
Run = Callable[..., ExecResult]


class Machine:
    """Runs the commands of a sandbox on this machine."""

    base_url = ""

    async def exec(self, command: Command) -> ExecResult:
        ended = await asyncio.to_thread(
            subprocess.run, command.argv, input=command.stdin, capture_output=True, check=False
        )
        return ExecResult(exit_code=ended.returncode, stdout=ended.stdout, stderr=ended.stderr)

    async def stop(self) -> None:
        raise NotImplementedError


async def see_nothing() -> frozenset[str]:
    return frozenset()


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    made = Witness()
    made.directory, made.key_file = str(tmp_path / "witness"), str(tmp_path / "witness" / "key")
    return made


@pytest.fixture
def run(tmp_path: Path, witness: Witness, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script with a test file in a directory."""
    monkeypatch.setattr(eval_script, "KILL_OTHERS", ":")  # it ends all processes of the machine
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)

    def in_directory(script: str, test_patch: str = "", without_renames: bytes = b"") -> ExecResult:
        texts, command = {"test_a.py": b"\x00", "new/test_b.py": b"new"}, Command(argv=[])
        hidden = file_changes(without_renames or test_patch.encode())
        running = eval_script.run(
            Machine(), script, test_patch, hidden, str(tmp_path), texts, witness, command, see_nothing
        )
        return asyncio.run(running)[0]

    return in_directory


@pytest.mark.parametrize("separator", ["\r\n", "\r", "\f", "\v", "\x1c", "\x85", "\u2028"])
def test_a_patch_in_the_script_stays_as_it_is(separator: str, run: Run, tmp_path: Path) -> None:
    """Guards against a test patch that does not apply, so that its data files are missing."""
    run(SCRIPT.format(f"+a{separator}b", "", ""))
    assert (tmp_path / "patch").read_bytes() == f"+a{separator}b\n".encode()


def test_only_the_tests_run_under_the_witness(run: Run, tmp_path: Path, witness: Witness) -> None:
    """Guards against a program before the tests that takes the witness's key, such as `conda activate testbed`."""
    result = run(SCRIPT.format("", "ls > files-before; ls -a $HOME > home-before", ""))
    assert (tmp_path / "before").read_text() == "\n"
    assert (tmp_path / "files-before").read_text() == "before\nfiles-before\npatch\n"
    assert ".polar-gym" not in (tmp_path / "home-before").read_text()
    assert (tmp_path / "during").read_text() == f"{witness.directory}\n"
    assert (tmp_path / "test_a.py").read_bytes() == b"\x00"
    assert Path(witness.key_file).read_bytes() == witness.key
    assert result.stdout.decode().splitlines()[-1].endswith(": 1")


STATE = """
shopt -s extglob
declare -A names=([one]="a b" ["two 2"]=$'c\\n"d"')
words=(x "y z"); plain="it's \\$HOME"; export EXPORTED=1
letters() { case $1 in +([a-z])) echo letters;; *) echo others;; esac; }
mkdir -p "a directory"; cd "a directory"; umask 027
set -o pipefail
unset POLAR_GYM_IMAGE
shopt -s expand_aliases; alias shouted='echo LOUD'
set -C; base64() { echo no; }
trap 'rm -rf ../temporary; echo echo the end' EXIT; mkdir ../temporary
"""
SAME_STATE = """
{ shopt -q extglob && echo "${names[one]} ${names[two 2]} ${words[1]} $plain" && letters abc; } >> ../state
(umask; basename "$PWD"; echo "$EXPORTED $-"; set -o | grep -E 'pipefail|nounset|errexit') >> ../state
echo "${POLAR_GYM_IMAGE-unset} $(shouted) $(cd ..; echo temporary*)" >> ../state
"""


def test_the_tests_run_in_the_state_of_the_lines_before(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against variables, functions, options, traps and a directory that are set before the tests and lost in
    them, or that spoil the lines between."""
    monkeypatch.setenv("POLAR_GYM_IMAGE", "of the image")
    result = run(SCRIPT.format("", STATE, SAME_STATE))
    said = (tmp_path / "state").read_text().splitlines()
    assert said[:3] == ["a b c", '"d" y z it\'s $HOME', "letters"], result.stdout.decode()
    assert said[3:5] == ["0027", "a directory"]
    exported, flags = said[5].split()
    assert exported == "1"
    assert {*flags} >= {"u", "x"}
    options = dict(line.split() for line in said[6:-1])
    assert options == {"errexit": "off", "nounset": "on", "pipefail": "on"}
    assert said[-1] == "unset LOUD temporary"
    assert not (tmp_path / "temporary").exists(), "the trap comes at the end of the tests"


@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$", "set -e; false", "echo the mark; echo umask 0; kill -9 $$"])
def test_no_test_runs_where_the_lines_before_end_the_script(
    end: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against tested code that ends the shell before the tests, and against a state of its own making: it may
    have read the mark in the shell's memory."""
    monkeypatch.setattr(secrets, "token_hex", lambda count: "the mark")
    result = run(SCRIPT.format("", end, ""))
    assert not (tmp_path / "during").exists()
    assert END not in result.stdout.decode()
    assert result.exit_code == (-signal.SIGKILL if "kill" in end else 1 if "false" in end else 0)


def test_programs_before_the_tests_cannot_read_the_script(run: Run, tmp_path: Path) -> None:
    """Guards against tested code that reads the hidden tests in the script, or writes other lines into the script."""
    result = run(f"tr '\\0' '\\n' < /proc/$$/cmdline > argv; cat > rest\n: '{START}'\n# hidden\n: '{END}'")
    assert (tmp_path / "argv").read_text() == "bash\n-s\n"
    assert (tmp_path / "rest").read_bytes() == b""
    assert END in result.stdout.decode()


PATCH = """\
diff --git a/new/test_b.py b/new/test_b.py
new file mode 100644
--- /dev/null
+++ b/new/test_b.py
@@ -0,0 +1 @@
+the original
"""
DATA = """\
diff --git a/data.txt b/data.txt
new file mode 100644
--- /dev/null
+++ b/data.txt
@@ -0,0 +1 @@
+read by a test
"""


@pytest.mark.parametrize("test_patch", [PATCH, PATCH + DATA])
def test_the_lines_before_the_tests_never_see_the_original_tests(test_patch: str, run: Run, tmp_path: Path) -> None:
    """Guards against tested code that learns which of a test's copies is the original, from git's own filters."""
    subprocess.run(["git", "init", "-q"], check=True)
    applied = f"set -e; git apply -v - <<'EOF'\n{test_patch}EOF\nls -AR > seen; cat data.txt >> seen || :"
    result = run(f"{applied}\n: '{START}'\nls -A > during\n: '{END}'", test_patch)
    assert "test_b.py" not in (tmp_path / "seen").read_text()
    assert ("read by a test" in (tmp_path / "seen").read_text()) == (DATA in test_patch)
    assert (tmp_path / "new" / "test_b.py").read_text() == "new", result.stdout.decode()
    assert ".polar-gym" not in (tmp_path / "during").read_text()


def test_a_binary_file_of_the_patch_is_there(run: Run, tmp_path: Path) -> None:
    """Guards against a corrupt patch, and tests without their data: the test module behind the file was taken out, and
    with it the empty line with which the file's part ended."""
    for command in ("init -q", "config user.name a", "config user.email a@b.example", "commit -q --allow-empty -m a"):
        subprocess.run(["git", *command.split()], check=True)
    data = bytes(range(256))
    for file, content in {"a_data/x.bin": data, "new/test_b.py": b"the original\n"}.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_bytes(content)
    subprocess.run(["git", "add", "-A", "a_data", "new"], check=True)
    made = subprocess.run(["git", "diff", "--cached", "--binary"], check=True, capture_output=True, text=True).stdout
    subprocess.run(["git", "rm", "-rfq", "a_data", "new"], check=True)
    result = run(f"set -e; git apply -v - <<'EOF'\n{made}EOF\n: '{START}'\n: '{END}'", made)
    assert (tmp_path / "a_data" / "x.bin").read_bytes() == data, result.stdout + result.stderr


RENAMES = """\
diff --git a/old.txt b/new.txt
similarity index 100%
rename from old.txt
rename to new.txt
"""
REMOVES_AND_MAKES = b"""\
diff --git a/new.txt b/new.txt
new file mode 100644
--- /dev/null
+++ b/new.txt
@@ -0,0 +1 @@
+gr\xfcn
diff --git a/old.txt b/old.txt
deleted file mode 100644
--- a/old.txt
+++ /dev/null
@@ -1 +0,0 @@
-gr\xfcn
"""


def test_a_file_that_the_patch_renames_may_have_any_encoding(run: Run, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / "old.txt").write_bytes(b"gr\xfcn\n")
    result = run(f"git apply - <<'EOF'\n{RENAMES}EOF\n: '{START}'\n: '{END}'", RENAMES, REMOVES_AND_MAKES)
    assert (tmp_path / "new.txt").read_bytes() == b"gr\xfcn\n", result.stdout
    assert not (tmp_path / "old.txt").exists()


def test_the_marks_stand_once_in_the_log(run: Run) -> None:
    """Guards against reports that are read from the script's own text, or from lines before the tests."""
    log = run(f"echo \"{START}\"; echo PASSED a; echo \"{END}\"\n: '{START}'\necho PASSED b\n: '{END}'").stdout.decode()
    assert (log.count(START), log.count(END)) == (1, 1)
    assert "PASSED b" in log.partition(START)[2].partition(END)[0]


LEFT = """
import ctypes, os, resource, signal, sys, time
shell = os.getppid()
if os.fork() == 0:
    os.setsid()
    {}
    end = time.monotonic() + 20
    while time.monotonic() < end:
        os.write(1, b"echo FORGED\\n")
        time.sleep(0.001)
    os._exit(0)
time.sleep(0.3)
"""
WAYS = {
    "stays": "",
    "looks dead": "ctypes.CDLL(None).prctl(15, b'x) Z\\n', 0, 0, 0)",
    "takes the shell's files": "resource.prlimit(shell, resource.RLIMIT_NOFILE, (3, 3))",
}


@pytest.mark.parametrize("options", ["", "set -euf"])
@pytest.mark.parametrize("way", WAYS)
def test_no_process_that_is_left_writes_the_state(way: str, options: str, tmp_path: Path) -> None:
    """Guards against tested code that is still alive, and whose output the tests' shell would run."""
    need_bubblewrap()
    (tmp_path / "left.py").write_text(LEFT.format(WAYS[way]))
    script = eval_script.preparing(f"{options}\ncd {tmp_path}; python3 left.py\n: '{START}'\n: '{END}'", "MARK")
    argv = ["bwrap", "--die-with-parent", "--unshare-pid", *("--bind", "/", "/", "--proc", "/proc", "--dev", "/dev")]
    ended = subprocess.run([*argv, "bash", "-s"], input=script.encode(), capture_output=True, check=False, timeout=600)
    _, found, state = ended.stdout.rpartition(b"MARK\n")
    assert b"FORGED" in ended.stdout
    assert not (found and b"FORGED" in state)
    assert bool(found) == ("shell" not in way), ended.stdout.decode()
