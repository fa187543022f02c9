"""The laws that hold when every killed process is up again and every session has ended. Each returns its breaches.

*Sampled* means received by the gateway. An answer of the engine may be in no episode if it never reached the gateway:
its gateway or the engine died at that moment, or the call was cut off before, because its harness was killed. A call
that was cut off is in the episode as cut off. An answer that a harness has read to its end is in an episode, without
exception: the gateway writes an answer to the journal before sending it.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.protocol import TaskState
from polar_gym.schema import Episode, ModelCall
from tests.faults.engine import ANSWER, run_of
from tests.faults.kills import Killer, containers, marked
from tests.faults.processes import Service

AROUND_A_KILL_SECONDS = (1.0, 3.0)
"""An answer of the engine may be lost from so many seconds before a kill to so many seconds after the kill."""


@dataclass(frozen=True, slots=True)
class Found:
    """All that a run leaves behind."""

    states: list[TaskState]
    episodes: dict[tuple[str, int], Episode]
    """All episodes of the server, accepted or excluded."""
    calls: dict[tuple[str, int], list[ModelCall]]
    """The calls in the nodes' journals."""
    answers: list[dict[str, object]]
    """The engine's answers."""
    results: list[tuple[str, str, str, int]]
    """The stored results of the receiver: key, kind, id, attempt."""
    arrivals: int
    refused: int

    @property
    def accepted(self) -> dict[str, Episode]:
        attempts = {s.session_id: s.attempt for state in self.states for s in state.sessions}
        keys = [key for key in self.episodes if attempts.get(key[0]) == key[1]]
        return {key[0]: self.episodes[key] for key in keys}


def find(service: Service, states: list[TaskState], episodes: Iterable[Episode]) -> Found:
    by_key = {(e.session.session_id, e.session.attempt): e for e in episodes}
    calls = {key: read_journal(Path(e.artifacts.journal)) for key, e in by_key.items() if e.artifacts.journal}
    answers = [orjson.loads(line) for line in service.answers.read_bytes().split(b"\n")[:-1]]
    with sqlite3.connect(service.results) as store:
        results = store.execute("SELECT key, kind, id, attempt FROM results").fetchall()
        (arrivals,) = store.execute("SELECT count(*) FROM arrivals").fetchone()
        (refused,) = store.execute("SELECT count(*) FROM refused").fetchone()
    return Found(states, by_key, calls, answers, results, arrivals, refused)


def every_session_ends(found: Found) -> list[str]:
    sessions = [session for state in found.states for session in state.sessions]
    wrong = [f"session {s.session_id} is {s.status}" for s in sessions if not s.status.final]
    wrong += [f"task {state.task_id} is {state.status}" for state in found.states if state.finished_at is None]
    lacking = [s for s in sessions if s.session_id not in found.accepted]
    return wrong + [f"session {s.session_id}.{s.attempt} has no accepted episode: {s.failure}" for s in lacking]


def counts_are_exact(found: Found) -> list[str]:
    """Return episodes whose fidelity differs from the journal, or whose traces differ from the engine's samples."""
    sampled = {answer["nonce"]: answer["ids"] for answer in found.answers}
    wrong = []
    for key, episode in found.episodes.items():
        fidelity, calls = episode.trajectory.fidelity, found.calls.get(key, [])
        tokens = sum(len(call.response_ids) for call in calls)
        if not fidelity.exact or (fidelity.calls, fidelity.sampled_tokens) != (len(calls), tokens):
            wrong.append(f"episode {key}: {fidelity!r} of {len(calls)} calls with {tokens} tokens")
        traced = {call_id for trace in episode.trajectory.traces for call_id in trace.call_ids}
        for call in calls:
            nonce = nonce_of(call)
            if nonce is not None and call.response_ids.tolist() != sampled.get(nonce, call.response_ids.tolist()):
                wrong.append(f"episode {key}: call {call.call_id} has other ids than the engine sampled")
            if nonce is not None and call.outcome == "delivered" and call.call_id not in traced:
                wrong.append(f"episode {key}: call {call.call_id} was delivered and is in no trace")
    return wrong


def no_call_is_lost(found: Found, killer: Killer) -> tuple[list[str], Counter[str]]:
    """Return the breaches, and the number of the engine's answers by where they ended."""
    nonces = {nonce for calls in found.calls.values() for call in calls if (nonce := nonce_of(call))}
    received = killer.witnessed | {nonce for episode in found.episodes.values() for nonce in printed(episode)}
    wrong = [f"a harness received {nonce}, which is in no episode" for nonce in received - nonces]
    calls = {call.call_id: call for calls in found.calls.values() for call in calls}
    cut = Counter((run_of(call.messages), len(call.messages)) for call in calls.values() if not nonce_of(call))
    service, became = killer.service, Counter[str]()
    gateway_kills = [at for node in service.nodes for at in node.kills]
    for answer in found.answers:
        nonce, at = str(answer["nonce"]), float(str(answer["at"]))
        if nonce in nonces:
            became["in an episode"] += 1
        elif cut[key := (str(answer["run"]), int(str(answer["messages"])))]:
            cut[key] -= 1
            became["cut off, in an episode as that"] += 1
        elif _near(at, gateway_kills):
            became["never reached its gateway, which was killed"] += 1
        elif _near(at, service.engine.kills):
            became["never left the engine, which was killed"] += 1
        else:
            became["lost"] += 1
            wrong.append(f"the engine's answer {nonce} is in no episode: {answer}")
    became["received by a harness"] = len(received)
    return wrong, became


def every_result_arrives_once(found: Found) -> list[str]:
    """Return results that did not arrive once: the accepted attempt of each session, and the end of each task.

    The receiver keeps each key once.
    """
    wanted = Counter(("session", s.session_id, s.attempt) for state in found.states for s in state.sessions)
    wanted += Counter(("task", state.task_id, 0) for state in found.states)
    got = Counter((kind, who, attempt) for _, kind, who, attempt in found.results)
    wrong = [f"{what} arrived {got[what]} times" for what in wanted | got if got[what] != wanted[what]]
    return wrong + ([f"{found.refused} callbacks were refused"] if found.refused else [])


def no_sandbox_is_left(killer: Killer, session_ids: Iterable[str]) -> list[str]:
    known, service = set(session_ids), killer.service
    left = [f"process {pid}: {' '.join(argv)[:100]}" for pid, argv in marked(killer.mark)]
    left += [f"container {each}" for each in containers(killer.docker_host, known)]
    left += [
        f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if str(service.directory) in line
    ]
    for path in Path("/sys/fs/cgroup").glob("**/polar-gym-*"):
        if path.is_dir() and path.name.removeprefix("polar-gym-").rpartition(".")[0] in known:
            left.append(f"control group {path}")
    for node in service.nodes:
        left += [f"sandbox {path}" for path in node.scratch.iterdir()]
        scratch = service.directory / node.name / "scratch"
        kept = sorted(scratch.glob("*/repository-*"))[:1]  # that of the tasks, for later sessions
        left += [f"scratch {path}" for path in scratch.glob("*/*") if path not in kept]
    return left


def tokens(found: Found) -> tuple[int, int, int]:
    """Return how many tokens were sampled, how many of them can be trained, and how many of the others are only in
    attempts that their node's death ended."""
    sampled = {call.call_id: len(call.response_ids) for calls in found.calls.values() for call in calls}
    trainable = sum(episode.trajectory.fidelity.trainable_tokens for episode in found.accepted.values())
    kept = {call.call_id for key, calls in found.calls.items() if not _died(found.episodes[key]) for call in calls}
    return sum(sampled.values()), trainable, sum(count for call_id, count in sampled.items() if call_id not in kept)


def _died(episode: Episode) -> bool:
    return episode.session.failure is not None and episode.session.failure.kind == "interrupted"


def nonce_of(call: ModelCall) -> str | None:
    content = (call.response or {}).get("content")
    return content.removeprefix(ANSWER) if isinstance(content, str) and content.startswith(ANSWER) else None


def printed(episode: Episode) -> list[str]:
    """Return the nonces that the episode's harness printed on receipt."""
    lines = [line.split() for line in episode.artifacts.stdout.splitlines()]
    return [words[1] for words in lines if len(words) == 2]


def _near(at: float, kills: Iterable[float]) -> bool:
    before, after = AROUND_A_KILL_SECONDS
    return any(kill - before <= at <= kill + after for kill in kills)


def attempts(found: Found) -> Mapping[tuple[str, int], int]:
    """Return (status, attempts) -> number of sessions."""
    return Counter((str(s.status), s.attempt + 1) for state in found.states for s in state.sessions)
