"""Make bare Debian and Ubuntu machines, type `./demo` twice and `./test` in a fresh clone, as root and as a plain user.

A machine is a directory of debootstrap in namespaces of its own, with this kernel and network. It gets the settings
of this machine's apt, pip and npm, and the certificates that this machine trusts. The clone holds the last commit.
`container` is Debian 12 in a Docker container with Docker's own limits, where no sandbox can be made: root types
`./demo` twice there. A system whose archive cannot be reached is skipped by name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_gym.console import make_console, table
from tests.show.result import Result, make_parser, parse
from tests.support.docker_daemon import own_daemon, running_daemon

SUITES = ("bookworm", "trixie", "noble")
UBUNTU = "http://archive.ubuntu.com/ubuntu"
CONTAINER = "container"
USERS = ("root", "plain")
FIRST_SECONDS = 90
SECOND_SECONDS = 15
FOREVER = float("inf")
DEBIAN = Path("/etc/apt/sources.list.d/debian.sources")
REWARDED = "the demo's reward is 1 in both runs"
FIRST = f"the first reward takes at most {FIRST_SECONDS} s, the second one {SECOND_SECONDS} s"
TESTED = "the tests pass"
LAWS = (REWARDED, FIRST, TESTED)
QUICK_TESTS = "tests/unit/builders"

ENTER = """
mount --rbind "$1" "$1"; mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"; mount --rbind /sys "$1/sys"
cd "$1" && pivot_root . mnt && umount --lazy /mnt
user=$2 && shift 2
exec setpriv --reuid="$user" --regid="$user" --init-groups env -i "$@"
"""


def archive_of(suite: str) -> str:
    """Return the URL of the archive that has a system: this machine's own for Debian."""
    lines = DEBIAN.read_text(encoding="utf-8").splitlines()
    return UBUNTU if suite == "noble" else next(line.split()[1] for line in lines if line.startswith("URIs:"))


def unreachable(suite: str) -> str:
    """Return why a system cannot be made here; empty where it can."""
    url = f"{archive_of(suite)}/dists/{suite}/Release"
    try:
        urllib.request.urlopen(url, timeout=20).close()
    except OSError as error:
        return f"{url}: {error}"
    return ""


def make_machine(suite: str, root: Path) -> None:
    """Make a system with this machine's settings of package managers, and a clone for each user."""
    debootstrap = ("--variant=minbase", "--include=ca-certificates", suite, str(root), archive_of(suite))
    if suite == "noble":  # Debian's debootstrap has neither Ubuntu's keys nor a name for its script
        run("debootstrap", "--no-check-gpg", *debootstrap, "/usr/share/debootstrap/scripts/gutsy")
        (root / "etc/apt/sources.list").write_text(f"deb {UBUNTU} noble main universe\n", encoding="utf-8")
    else:
        run("debootstrap", *debootstrap)
        sources = DEBIAN.read_text(encoding="utf-8")
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


def environment_of(user: str) -> list[str]:
    certificates = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    trusted = [f"{name}={certificates}" for name in ("PIP_CERT", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")]
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return [f"HOME={home_of(user)}", "TERM=dumb", path, *trusted]


def in_namespaces(root: Path, user: str) -> list[str]:
    """Return the argv prefix of a command that a user types on the machine."""
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-ec", ENTER, "enter"]
    return [*enter, str(root), user, *environment_of(user)]


@contextlib.contextmanager
def in_container(root: Path) -> Iterator[list[str]]:
    """Start a container of the machine's files, and give the argv prefix of a command that root types in it."""
    name = f"polar-gym-bare-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        docker = ["docker", "--host", running_daemon() or stack.enter_context(own_daemon())]
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as files:
            imported = [*docker, "import", "-", name]
            subprocess.run(imported, stdin=files.stdout, check=True, stdout=subprocess.DEVNULL)
        stack.callback(run, *docker, "rmi", name)
        run(*docker, "run", "--detach", "--network", "host", "--name", name, name, "sleep", "infinity")
        stack.callback(run, *docker, "rm", "--force", name)
        yield [*docker, "exec", name, "env", *environment_of("root")]


def typed(enter: Sequence[str], command: str) -> Typed:
    """Run a command in the clone; `enter` is the argv prefix of commands there."""
    began, rewarded, lines = time.monotonic(), None, list[str]()
    with subprocess.Popen(
        [*enter, "bash", "-c", f"cd ~/polar-gym && {command}"],
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
    parser.add_argument("--suites", nargs="*", default=SUITES, choices=SUITES, help="default: %(default)s")
    parser.add_argument("--tests", default="", help="arguments of ./test, such as --all (default: a plain ./test)")
    parser.add_argument("--container", action=argparse.BooleanOptionalAction, default=True, help="default: yes")
    options = parse(parser, quick={"suites": SUITES[:1], "tests": QUICK_TESTS})
    if os.geteuid() or not shutil.which("debootstrap"):
        sys.exit("show-bare makes machines as root, with debootstrap: apt-get install debootstrap")
    result = Result("bare", LAWS, options)
    console = make_console()
    shown = table("bare machines", "system, user", "commands", "first reward s", "again", "./test")
    systems = []
    for suite in options.suites:
        if why := unreachable(suite):
            console.print(f"{suite}: skipped: {why}", markup=False)
            result.figures[suite] = f"skipped: {why}"
        else:
            systems += [(suite, user) for user in USERS]
    for suite, user in [*systems, *([(CONTAINER, "root")] if options.container else [])]:
        name = f"{suite}, {user}"
        with tempfile.TemporaryDirectory(prefix="polar-gym-bare-") as directory:
            root = Path(directory) / "root"
            make_machine(SUITES[0] if suite == CONTAINER else suite, root)
            with (
                in_container(root) if suite == CONTAINER else contextlib.nullcontext(in_namespaces(root, user)) as enter
            ):
                first, second = typed(enter, "./demo"), typed(enter, "./demo")
                tests = None if suite == CONTAINER else typed(enter, f"./test {options.tests}")
        for each in (first, second, tests):
            if each is not None:
                said = f"{name}: {each.seconds} s, status {each.status}"
                console.print(said, each.output[-3000:], markup=False, highlight=False)
        rewarded = all(run.status == 0 and "mean reward 1.000" in run.output for run in (first, second))
        result.check(REWARDED, [] if rewarded else [name])
        slow = (first.rewarded or FOREVER) > FIRST_SECONDS or (second.rewarded or FOREVER) > SECOND_SECONDS
        result.check(FIRST, [f"{name}: {first.rewarded} s, {second.rewarded} s"] if slow else [])
        result.check(TESTED, [f"{name}: status {tests.status}"] if tests is not None and tests.status else [])
        lines = first.output.splitlines()
        result.figures[name] = {
            "first reward": [first.rewarded, second.rewarded],
            "./demo": [first.seconds, second.seconds],
            "./test": [tests.seconds, tests.status] if tests is not None else None,
            "brought": [line for line in lines if "packages" in line or "come into .venv" in line],
        }
        ended = "-" if tests is None else f"{'failed' if tests.status else 'passed'}, {tests.seconds} s"
        shown.add_row(name, "1", *(str(run.rewarded or "-") for run in (first, second)), ended)
    console.print(shown)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
