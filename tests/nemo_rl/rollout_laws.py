"""The laws of `rollouts`: which facts of a session are right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tests.nemo_rl.rollout_cases import BRANCHES, CASES, FAILS, SOLVES, TRUNCATED, Case, Plan

PLAYED, EXACT, EVERY, GROUPED, ALONE, STEPPED, CLEAN = LAWS = (
    "each session ends as its policy has it end, and no session ends the batch",
    "NeMo RL's messages are the main trace, with its ids, mask and logprobs",
    "with all traces, each sampled token of a session that did not fail is trained, and no other",
    "with all traces, the sessions of a row are one group, in which failures have no vote",
    "NeMo RL alone groups the same sessions, except across midnight, and trains the main trace",
    "the optimizer's step changes the policy",
    "NeMo RL's shutdown in the middle of a session leaves no process of the sandbox",
)
Facts = dict[str, Any]
OF_NAME = {case.name: case for case in CASES}


def breaches(sessions: Sequence[Facts]) -> dict[str, list[str]]:
    """Return the breaches of each law."""
    found: dict[str, list[str]] = {law: [] for law in LAWS}
    plans: dict[str, list[str]] = defaultdict(list)
    for session in sessions:
        case = OF_NAME[session["case"]]
        plans[case.name].append(session["plan"])
        for law, wrong in wrongs(session, case):
            found[law].append(f"{case.name}, {session['plan']}: {wrong}")
    for name, played in plans.items():
        if sorted(played) != sorted(OF_NAME[name].plans):
            found[PLAYED].append(f"{name}: the plans are {', '.join(played)}")
    return found


def wrongs(session: Facts, case: Case) -> Iterable[tuple[str, str]]:
    """Yield what is wrong with a session, by law."""
    plan: Plan = session["plan"]
    failed, every, alone = plan in FAILS, session["every"], session["alone"]
    if session["failure"] != FAILS.get(plan):
        yield PLAYED, f"failure {session['failure']}: {session['reason']}"
    if session["reward"] != (plan in SOLVES):
        yield PLAYED, f"reward {session['reward']}"
    if not failed and session["truncated"] != (plan in TRUNCATED):
        yield PLAYED, f"truncated {session['truncated']}"
    if not failed and (session["traces"] > 1) != (plan in BRANCHES):
        yield PLAYED, f"{session['traces']} traces"
    if not session["exact"]:
        yield EXACT, "the messages are others"
    if every["tokens"] != (0 if failed else session["sampled"]):
        yield EVERY, f"{every['tokens']} of {session['sampled']} tokens are trained"
    if every["advantages"] != [case.advantage(plan)]:
        yield GROUPED, f"advantage {every['advantages']}"
    if alone["advantages"] != [case.advantage(plan, split=case.splits)]:
        yield ALONE, f"advantage {alone['advantages']}"
    part = 0 < alone["tokens"] < session["sampled"] if plan in BRANCHES else alone["tokens"] == every["tokens"]
    if not part:
        yield ALONE, f"{alone['tokens']} of {session['sampled']} tokens are trained"
    if not min(session["moved"], session["moved_alone"]) > 0:
        yield STEPPED, "the policy is as before"
    if session["left"]:
        yield CLEAN, f"{session['left']} processes are left"
