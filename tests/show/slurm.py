"""Run the recipe of Slurm on a one-machine Slurm: submitted, pre-empted half-way, requeued, and gone on with.

Slurm's own daemons (Debian's `slurm-wlm`) run on this machine with two partitions. `recipes/deploy/slurm.sh` is
submitted to the low one, and gets sessions of a real CLI with a scripted policy. When some have ended and others run, a
job in the high partition pre-empts it: Slurm ends its processes and queues it again. After that job, the same job id
starts anew with the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from polar_gym.client import RolloutClient
from polar_gym.console import make_console, table
from polar_gym.protocol import TaskState, TaskStatus
from polar_gym.schema import Episode, HarnessSpec, RuntimeSpec, TaskRequest
from tests.show.result import Result, make_parser, parse

RECIPE = Path(__file__).parents[2] / "recipes" / "deploy" / "slurm.sh"
SERVER = "http://localhost:8700"
REQUEUED, USABLE, ONCE, BALANCE = LAWS = (
    "Slurm pre-empts the job, and starts it again",
    "every sample ends with one accepted episode that has a reward",
    "sessions that were cut off go on from their record, and all end with all of their calls",
    "sampled tokens = trainable tokens + excluded tokens",
)
TURNS = 6
CONFIGURATION = """
ClusterName=polar-gym
SlurmctldHost=localhost
SlurmctldPort={control}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
CryptoType=crypto/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=60
MinJobAge=600
SchedulerParameters=sched_interval=2
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
NodeName=localhost NodeAddr=127.0.0.1 State=UNKNOWN
PartitionName=low Nodes=localhost Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high Nodes=localhost MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A Slurm of one machine, whose files are in a directory."""

    def __init__(self, directory: Path) -> None:
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "HOME": str(directory / "home"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "POLAR_GYM_CACHE": os.environ.get("POLAR_GYM_CACHE", str(Path.home() / ".cache" / "polar-gym")),
        }

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        return dict(each.split("=", 1) for each in self.run("scontrol", "show", "job", number).split() if "=" in each)


@contextlib.contextmanager
def started(directory: Path) -> Iterator[Slurm]:
    """Start Slurm's daemons, and end them with all jobs."""
    for name in ("state", "spool", "home/.polar-gym"):
        (directory / name).mkdir(parents=True)
    for name in ("service", "node"):
        file = directory / "home" / ".polar-gym" / f"{name}.key"
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32), encoding="utf-8")
    ports = {"control": 16817, "daemon": 16818}
    (directory / "slurm.conf").write_text(CONFIGURATION.format(directory=directory, **ports), encoding="utf-8")
    slurm = Slurm(directory)
    with contextlib.ExitStack() as stack:
        for program in ("slurmctld", "slurmd"):
            argv = [program, "-D", *(["-N", "localhost"] if program == "slurmd" else [])]
            with (directory / f"{program}.out").open("wb") as output:
                process = subprocess.Popen(argv, env=slurm.environment, stdout=output, stderr=output)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        deadline = time.monotonic() + 120
        while (
            "idle"
            not in subprocess.run(
                ["sinfo", "--noheader"], env=slurm.environment, capture_output=True, text=True, check=False
            ).stdout
        ):
            if time.monotonic() > deadline:
                sys.exit((directory / "slurmd.log").read_text(encoding="utf-8")[-2000:])
            time.sleep(0.5)
        yield slurm
        slurm.run("scancel", "--user=root")
        while slurm.run("squeue", "--noheader"):
            time.sleep(0.5)


def request(sessions: int) -> TaskRequest:
    return TaskRequest(
        task_id="slurm",
        instruction="Look around.",
        num_samples=sessions,
        runtime=RuntimeSpec(name="bubblewrap"),
        agent=HarnessSpec(name="pi"),
        retries={"node_death": 5},  # pyright: ignore[reportArgumentType]
    )


async def answers(client: RolloutClient) -> None:
    """Wait until the rollout server answers and has a node."""
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, RuntimeError):
                if await client.nodes():
                    return
            await asyncio.sleep(0.5)


async def half_way(client: RolloutClient, sessions: int) -> None:
    """Wait until a third of the sessions have ended and others run."""
    async with asyncio.timeout(600):
        while True:
            state = await client.task("slurm")
            running = [each for each in state.sessions if each.status == "RUNNING"]
            if state.usable >= sessions // 3 and running:
                return
            await asyncio.sleep(0.1)


async def show(slurm: Slurm, sessions: int, key: str) -> tuple[TaskState, list[Episode], dict[str, str], float]:
    """Return the task's end, all of its episodes, what Slurm says of the job, and how long it was gone."""
    commands = ["ls"] * (TURNS - 1)
    settings = ["engine=embedded", f"engine.scripts=[{{commands:[{','.join(commands)}],final_message:Done.}}]"]
    settings += ["engine.delay_seconds=1", "runtime=bubblewrap", "pools.run=2", "rollout.timeout_seconds=600"]
    job = slurm.run("sbatch", "--parsable", "--partition=low", f"--output={os.devnull}", str(RECIPE), *settings)
    async with RolloutClient(SERVER, key=key) as client:
        await answers(client)
        await client.submit(request(sessions))
        await half_way(client, sessions)
        slurm.run("sbatch", "--parsable", "--partition=high", "--exclusive", f"--output={os.devnull}", "--wrap=sleep 3")
        gone = time.monotonic()
        async with asyncio.timeout(300):
            while slurm.job(job)["Restarts"] == "0":  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            while slurm.job(job)["JobState"] != "RUNNING":  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        await answers(client)
        back = time.monotonic() - gone
        async with asyncio.timeout(900):
            state = await client.wait("slurm")
        episodes = [episode async for episode in client.episodes("slurm", excluded=True)]
    return state, episodes, slurm.job(job), back


def main() -> int:
    parser = make_parser("slurm", __doc__, quick="half of the sessions")
    parser.add_argument("--sessions", type=int, default=16)
    options = parse(parser, quick={"sessions": 8})
    for program in ("slurmctld", "slurmd", "sbatch"):
        if not shutil.which(program) or os.geteuid():
            sys.exit(f"show-slurm starts {program} as root; install it with: apt-get install slurm-wlm")
    result = Result("slurm", LAWS, options)
    with tempfile.TemporaryDirectory(prefix="pg-slurm-") as name:
        directory = Path(name)
        with started(directory) as slurm:
            key = (directory / "home/.polar-gym/service.key").read_text(encoding="utf-8")
            state, episodes, job, back = asyncio.run(show(slurm, options.sessions, key))
    check(result, state, episodes, job)
    resumed = [each for each in episodes if each.session.timing.replay is not None]
    result.figures = {
        "sessions": options.sessions,
        "restarts": job["Restarts"],
        "seconds_away": round(back, 1),
        "begun_again_or_resumed": sum(each.attempt > 0 for each in state.sessions),
        "resumed": len(resumed),
        "seconds_of_replay": [round(each.session.timing.replay or 0, 1) for each in resumed],
    }
    shown = table("a job that Slurm pre-empts", "what", "")
    for what, value in result.figures.items():
        shown.add_row(what.replace("_", " "), str(value))
    make_console().print(shown)
    return result.finish()


def check(result: Result, state: TaskState, episodes: list[Episode], job: dict[str, str]) -> None:
    result.check(REQUEUED, [] if job["Restarts"] == "1" else [f"restarts: {job['Restarts']}"])
    ended = state.status is TaskStatus.COMPLETED and state.usable == result.options.sessions
    failed = [f"{key_of(each)}: {each.session.failure}" for each in episodes if each.session.failure is not None]
    result.check(USABLE, [] if ended else [f"{state.usable} usable episodes", *failed])
    accepted = {(each.session_id, each.attempt) for each in state.sessions}
    again = [each for each in episodes if each.session.attempt and key_of(each) in accepted]
    breaches = [] if again else ["no session was cut off"]
    whole = [each for each in episodes if key_of(each) in accepted]
    breaches += [f"{key_of(each)}: {each.trajectory.fidelity.calls} calls" for each in whole if not_all(each)]
    for episode in again:
        cut = [
            each for each in episodes if each.session.session_id == episode.session.session_id and each is not episode
        ]
        had = sum(each.trajectory.fidelity.calls for each in cut)
        if had and episode.session.timing.replay is None:
            breaches.append(f"{key_of(episode)}: {had} calls before, and none from the record")
    result.check(ONCE, breaches)
    wrong = []
    for episode in episodes:
        fidelity = episode.trajectory.fidelity
        if fidelity.sampled_tokens != fidelity.trainable_tokens + sum(fidelity.excluded.values()):
            wrong.append(f"{episode.session.session_id}: {fidelity}")
    result.check(BALANCE, wrong)


def not_all(episode: Episode) -> bool:
    return episode.trajectory.fidelity.calls != TURNS


def key_of(episode: Episode) -> tuple[str, int]:
    return episode.session.session_id, episode.session.attempt


if __name__ == "__main__":
    sys.exit(main())
