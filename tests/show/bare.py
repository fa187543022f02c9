"""Make bare Debian machines, type `./demo` twice and `./test` in a fresh clone, as root and as a plain user.

A machine is a directory of debootstrap in namespaces of its own, with this kernel and network. It gets the settings
of this machine's apt, pip and npm, and the certificates that this machine trusts. The clone holds the last commit.
Ubuntu's systems, and containers without user namespaces, are not made here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from polar_gym.console import make_console, table
from tests.show.result import Result, make_parser, parse

SUITES = ("bookworm", "trixie")
USERS = ("root", "plain")
FIRST_SECONDS = 90
SECOND_SECONDS = 15
FOREVER = float("inf")
REWARDED = "the demo's reward is 1 in both runs"
FIRST = f"the first reward takes at most {FIRST_SECONDS} s, the second one {SECOND_SECONDS} s"
TESTED = "the tests pass"
LAWS = (REWARDED, FIRST, TESTED)
QUICK_TESTS = "tests/unit/builders"

ENTER = """
mount --rbind "$1" "$1"; mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"; mount --rbind /sys "$1/sys"
cd "$1" && pivot_root . mnt && umount --lazy /mnt
exec setpriv --reuid="$2" --regid="$2" --init-groups env -i HOME="$3" TERM=dumb PIP_CERT="$4" SSL_CERT_FILE="$4" \
    NODE_EXTRA_CA_CERTS="$4" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    bash -c "cd ~/polar-gym && $5"
"""


def make_machine(suite: str, root: Path) -> None:
    """Make a Debian with this machine's settings of package managers, and a clone for each user."""
    sources = Path("/etc/apt/sources.list.d/debian.sources").read_text(encoding="utf-8")
    mirror = next(line.split()[1] for line in sources.splitlines() if line.startswith("URIs:"))
    run("debootstrap", "--variant=minbase", "--include=ca-certificates", suite, str(root), mirror)
    here = next(line.split()[1] for line in sources.splitlines() if line.startswith("Suites:"))
    (root / "etc/apt/sources.list").unlink(missing_ok=True)
    (root / "etc/apt/sources.list.d/debian.sources").write_text(sources.replace(here, suite), encoding="utf-8")
    for setting in ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf"):
        if Path(setting).exists():
            shutil.copy(setting, root / setting[1:])
    for certificate in Path("/usr/local/share/ca-certificates").glob("*.crt"):
        shutil.copy(certificate, root / "usr/local/share/ca-certificates")
    run("chroot", str(root), "update-ca-certificates")
    run("chroot", str(root), "useradd", "--create-home", "plain")
    for user in USERS:
        home = root / home_of(user)[1:]
        if (settings := Path.home() / ".npmrc").exists():
            shutil.copy(settings, home)
        run("git", "clone", "--quiet", "--no-hardlinks", ".", str(home / "polar-gym"))
    run("chroot", str(root), "chown", "--recursive", "plain:", "/home/plain")


def home_of(user: str) -> str:
    return "/root" if user == "root" else f"/home/{user}"


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@dataclass(frozen=True, slots=True)
class Typed:
    """A command that a user typed in the clone."""

    seconds: float
    rewarded: float | None
    """Seconds until the first line that says a reward of 1."""
    status: int
    output: str


def typed(root: Path, user: str, command: str) -> Typed:
    """Run a command as the user, in the clone."""
    certificates = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-ec", ENTER, "enter"]
    began, rewarded, lines = time.monotonic(), None, list[str]()
    with subprocess.Popen(
        [*enter, str(root), user, home_of(user), certificates, command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if rewarded is None and "reward 1" in line:
                rewarded = round(time.monotonic() - began, 1)
    return Typed(round(time.monotonic() - began, 1), rewarded, process.returncode, "".join(lines))


def main() -> int:
    parser = make_parser("bare", __doc__, quick=f"all systems but {SUITES[0]}, and all tests but {QUICK_TESTS}")
    parser.add_argument("--suites", nargs="+", default=SUITES, choices=SUITES, help="default: %(default)s")
    parser.add_argument("--tests", default="", help="arguments of ./test, such as --all (default: a plain ./test)")
    options = parse(parser, quick={"suites": SUITES[:1], "tests": QUICK_TESTS})
    if os.geteuid() or not shutil.which("debootstrap"):
        sys.exit("show-bare makes machines as root, with debootstrap: apt-get install debootstrap")
    result = Result("bare", LAWS, options)
    console = make_console()
    shown = table("bare machines", "system, user", "commands", "first reward s", "again", "./test")
    for suite in options.suites:
        for user in USERS:
            with tempfile.TemporaryDirectory(prefix="polar-gym-bare-") as directory:
                root = Path(directory) / "root"
                make_machine(suite, root)
                first, second = typed(root, user, "./demo"), typed(root, user, "./demo")
                tests = typed(root, user, f"./test {options.tests}")
            name = f"{suite}, {user}"
            for each in (first, second, tests):
                said = f"{name}: {each.seconds} s, status {each.status}"
                console.print(said, each.output[-3000:], markup=False, highlight=False)
            rewarded = all(run.status == 0 and "mean reward 1.000" in run.output for run in (first, second))
            result.check(REWARDED, [] if rewarded else [name])
            slow = (first.rewarded or FOREVER) > FIRST_SECONDS or (second.rewarded or FOREVER) > SECOND_SECONDS
            result.check(FIRST, [f"{name}: {first.rewarded} s, {second.rewarded} s"] if slow else [])
            result.check(TESTED, [f"{name}: status {tests.status}"] if tests.status else [])
            lines = first.output.splitlines()
            result.figures[name] = {
                "first reward": [first.rewarded, second.rewarded],
                "./demo": [first.seconds, second.seconds],
                "./test": [tests.seconds, tests.status],
                "brought": [line for line in lines if "packages" in line or "come into .venv" in line],
            }
            ended = "passed" if not tests.status else "failed"
            shown.add_row(
                name, "1", *(str(run.rewarded or "-") for run in (first, second)), f"{ended}, {tests.seconds} s"
            )
    console.print(shown)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
