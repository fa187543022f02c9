"""The cases of `rollouts`: what the policy does in the samples of a row. The agent servers import this file too.

Each case is one row of NeMo RL's data set, and its samples are one group. All cases have the same task, whose first
line names the case.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Literal

from polar_gym.harnesses import Launch, LaunchContext
from polar_gym.harnesses.pi import HARNESS as PI
from polar_gym.harnesses.today import told_today
from polar_gym.tasks import Task
from polar_gym.tasks.bundled import BundledTasks
from polar_gym.tasks.rows import Selection

Plan = Literal["solve", "idle", "loop", "sleep", "compact", "delegate", "kill", "crash", "outage", "dead"]
"""`solve`: play the reference solution. `idle`: look around and end. `loop`: call until the budget is used up. `sleep`:
start a command that outlasts the session. `compact`: fill the context, then solve. `delegate`: have a sub-agent solve.
`kill`: kill the harness, which is the policy's own fault. `crash`: the harness ends with an error before any call.
`outage`: after the first call, the engine answers nothing more. `dead`: the engine answers no call of the session.
"""
FAILS: dict[Plan, str] = {"crash": "agent_run_error", "outage": "provider_unavailable", "dead": "provider_unavailable"}
"""The plans whose sessions are masked, with NeMo Gym's failure kind."""
SOLVES: frozenset[Plan] = frozenset({"solve", "compact", "delegate"})
TRUNCATED: frozenset[Plan] = frozenset({"loop", "sleep"})
BRANCHES: frozenset[Plan] = frozenset({"compact", "delegate"})
"""The plans whose sessions have more than one trace."""

PI_AGENT, CODEX_AGENT = "polar_swe_agent", "polar_codex_agent"
MIDNIGHT_AGENT, HURRIED_AGENT = "polar_midnight_agent", "polar_hurried_agent"
CRASHING_AGENT, OUTAGE_AGENT = "polar_crashing_agent", "polar_outage_agent"


@dataclass(frozen=True)
class Case:
    name: str
    agent: str
    plans: tuple[Plan, Plan]
    """Of the samples, in the order in which they begin."""
    splits: bool = False
    """Whether NeMo RL's own grouping, by the first prompt, makes two groups of the samples."""
    quick: bool = False

    @property
    def instance_id(self) -> str:
        return f"case__{self.name}"

    @property
    def title(self) -> str:
        """The words in the task by which the policy knows the case."""
        return f"[case {self.name}]"

    def advantage(self, plan: Plan, *, split: bool = False) -> float:
        """Return the right advantage of a sample. `split`: the samples are not one group."""
        if split or plan in FAILS or any(each in FAILS for each in self.plans):
            return 0.0
        return 0.7071 if plan in SOLVES else -0.7071


CASES = (
    Case("plain-pi", PI_AGENT, ("solve", "idle"), quick=True),
    Case("plain-codex", CODEX_AGENT, ("solve", "idle")),
    Case("calls-pi", PI_AGENT, ("solve", "loop")),
    Case("time-pi", HURRIED_AGENT, ("solve", "sleep")),
    Case("compaction-pi", PI_AGENT, ("compact", "idle"), quick=True),
    Case("compaction-codex", CODEX_AGENT, ("compact", "idle")),
    Case("sub-agent-codex", CODEX_AGENT, ("delegate", "idle")),
    Case("killed-pi", PI_AGENT, ("solve", "kill")),
    Case("crash-pi", CRASHING_AGENT, ("solve", "crash")),
    Case("outage-pi", OUTAGE_AGENT, ("solve", "outage")),
    Case("dead-engine-pi", PI_AGENT, ("dead", "dead"), quick=True),
    Case("midnight-pi", MIDNIGHT_AGENT, ("solve", "idle"), splits=True),
)
SHUTDOWN = Case("shutdown-pi", PI_AGENT, ("sleep", "sleep"))
"""Not in the step: NeMo RL shuts NeMo Gym down in the middle of this session."""


class CaseTasks(BundledTasks):
    """The first bundled task, once for each case."""

    def __init__(self, options: Selection) -> None:
        super().__init__(options.model_copy(update={"limit": 1}))

    def load(self) -> list[Task]:
        (task,) = super().load()
        issue = task.problem_statement.strip()
        return [
            task.model_copy(update={"instance_id": case.instance_id, "problem_statement": f"{case.title} {issue}"})
            for case in (*CASES, SHUTDOWN)
        ]


TASKS = CaseTasks
_LAUNCHES = itertools.count()
"""Each agent server is a process, with a count of its own."""


def _next_day(context: LaunchContext) -> Launch:
    day = date(2026, 11, 21) + timedelta(days=next(_LAUNCHES) % 2)
    context = dataclasses.replace(context, spec=context.spec.model_copy(update={"today": day}))
    return told_today(PI, PI.launch(context), context)


ACROSS_MIDNIGHT = dataclasses.replace(PI, launch=_next_day, told_today_by=None)
"""Pi, whose samples begin before and after midnight in turn, and which is not told the date of its group."""


def _second_crashes(context: LaunchContext) -> Launch:
    if next(_LAUNCHES) % 2:
        return Launch(argv=["sh", "-c", "echo 'cannot find my left shoe' >&2; exit 3"])
    return PI.launch(context)


SECOND_CRASHES = dataclasses.replace(PI, launch=_second_crashes, told_today_by=None)
"""Pi, whose every second launch ends with an error."""


def agents(shipped: dict[str, Any], names: set[str], outage_url: str) -> dict[str, Any]:
    """Return the agent servers by name. `shipped`: the block of `polar_swe_agent`. `outage_url`: the engine that has an
    outage."""
    settings: dict[str, dict[str, Any]] = {
        PI_AGENT: {},
        CODEX_AGENT: {"harness": "codex"},
        MIDNIGHT_AGENT: {"harness": "tests.nemo_rl.rollout_cases:ACROSS_MIDNIGHT"},
        HURRIED_AGENT: {"rollout": {"timeout_seconds": 180}},
        CRASHING_AGENT: {"harness": "tests.nemo_rl.rollout_cases:SECOND_CRASHES"},
        OUTAGE_AGENT: {},
    }
    others = {OUTAGE_AGENT: {"policy_base_url": outage_url, "concurrency": 1}}
    ((kind, servers),) = shipped.items()
    ((folder, server),) = servers.items()
    return {
        name: {kind: {folder: {**server, **others.get(name, {}), "polar": {**server["polar"], **settings[name]}}}}
        for name in sorted(names)
    }
