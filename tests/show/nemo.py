"""Run NeMo Gym 0.4 and 0.7 by their own commands, with a real vLLM as the policy model: `make show-nemo`.

The program starts the servers with `gym env start --environment polar_swe` and collects rollouts with `gym eval run`.
For each case it prints the sampled tokens, the tokens that reach a trainer, and whether the answers obey the laws that
trainers rely on: token items that continue each other (NeMo RL's walk), the strict form of `training_traces`, every
sampled token delivered once or excluded by name.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import yaml
from rich.table import Table

from polar_gym.console import make_console
from polar_gym.nemo import ENVIRONMENT, component_root
from tests.e2e.nemo_gym import INSTALL, PYTHONS, NemoGym, installed, nemo_gym, serving
from tests.e2e.observed_vllm import SHELL_CALLS, observed
from tests.e2e.vllm_server import INSTALL as INSTALL_VLLM
from tests.e2e.vllm_server import VllmServer, run_server, vllm_python
from tests.show.result import Result, make_parser, parse
from tests.support.envelopes import check_envelope
from tests.support.nemo_rl import consumed

(LAWFUL,) = LAWS = ("every answer obeys the laws that trainers rely on",)
Answer = dict[str, Any]

SAYS = [*[f"<tool_call>\n{SHELL_CALLS['pi']}\n</tool_call>"] * 2, "All done."]

EMBEDDED = {"runtime": "bubblewrap", "rollout": {"timeout_seconds": 200}}
VLLM = {
    "runtime": "bubblewrap",
    "harness": {"name": "pi", "profile": "lean", "max_output_tokens": 256},
    "budget": {"max_calls": 6},
    "rollout": {"timeout_seconds": 120},
}
"""For the shipped agent: a small model on a CPU gets a short budget."""
AGENTS: dict[str, dict[str, Any]] = {
    "solving_agent": {"polar": {**EMBEDDED, "harness": "pi", "engine": "embedded"}},
    "delegating_agent": {
        "polar": {**EMBEDDED, "harness": "claude_code", "engine": {"name": "polar_gym.conformance.acting:Delegating"}}
    },
    "compacting_agent": {
        "polar": {
            **EMBEDDED,
            "harness": {"name": "claude_code", "profile": "lean"},
            "engine": {"name": "polar_gym.conformance.acting:Compacting"},
        }
    },
    "crashing_agent": {"polar": {**EMBEDDED, "harness": "tests.e2e.broken_harness:CRASHING", "engine": "embedded"}},
    "dead_engine_agent": {"policy_base_url": "http://127.0.0.1:9/v1", "polar": {**EMBEDDED, "harness": "pi"}},
}


@dataclass(frozen=True)
class Case:
    title: str
    agent: str
    rows: int = 1
    repeats: int = 1
    task: str | None = None
    """The task that replaces the rows' own."""
    masked: str | None = None
    """The failure kind that every rollout must have."""
    reward: float | None = None
    traces: int = 1
    """The least number of traces."""
    calls: int = 1
    """The least number of calls. A single call continues nothing."""


CASES = (
    Case("vLLM on the CPU", "polar_swe_agent", rows=5, repeats=2, calls=3),
    Case("reference solutions", "solving_agent", rows=5, repeats=2, reward=1.0),
    Case("a sub-agent", "delegating_agent", reward=1.0, traces=2),
    Case("a compaction", "compacting_agent", reward=1.0, traces=2),
    Case("failing harness", "crashing_agent", masked="agent_run_error"),
    Case("dead engine", "dead_engine_agent", masked="provider_unavailable"),
    Case("unknown task", "solving_agent", task="nope", masked="polar:unknown_task"),
)
QUICK = tuple(replace(case, rows=1, repeats=1) for case in CASES[:2])


@dataclass
class Outcome:
    """The answers of a case under one version."""

    version: str
    case: Case
    answers: list[Answer]
    problems: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        return int(sum(answer.get(name, 0) for answer in self.answers))

    @property
    def delivered(self) -> int:
        """Sampled tokens that are trained on somewhere in `training_traces`."""
        traces = [trace for answer in self.answers for trace in answer.get("training_traces", {}).get("traces", [])]
        return sum(sum(trace["loss_mask"]) for trace in traces)

    @property
    def consumed(self) -> int:
        """Sampled tokens that a trainer of single sequences gets."""
        walks = [consumed(answer["response"]["output"]) for answer in self.answers if not answer["mask_sample"]]
        return sum(len(sampled) for walk in walks for _, sampled in walk)

    def cells(self) -> list[str]:
        rewards = [answer["reward"] for answer in self.answers]
        reason = next((answer["failure_reason"] for answer in self.answers if answer["mask_sample"]), "")
        sampled = self.total("sampled_tokens")
        return [
            self.version,
            self.case.title,
            str(len(self.answers)),
            f"{sum(rewards) / len(rewards):.2f}" if rewards else "",
            str(sum(answer["mask_sample"] for answer in self.answers)),
            str(self.total("model_calls")),
            str(self.total("traces")),
            str(sampled),
            str(self.delivered),
            str(self.total("excluded_tokens")),
            f"{self.consumed / sampled:.2f}" if sampled else "",
            "; ".join(self.problems) or reason or "all laws hold",
        ]


FIGURES = ("rollouts", "reward", "masked", "calls", "traces", "sampled", "delivered", "excluded", "consumed")
HEADINGS = ("nemo-gym", "case", *FIGURES, "reason, or what is wrong")


def run_case(gym: NemoGym, case: Case) -> Outcome:
    lines = (component_root() / ENVIRONMENT / "data" / "example.jsonl").read_bytes().splitlines()[: case.rows]
    rows = [orjson.loads(line) for line in lines]
    if case.task is not None:
        rows = [{**row, "verifier_metadata": {"instance_id": case.task}} for row in rows]
    outcome = Outcome(gym.version, case, gym.evaluate(rows, case.agent, case.repeats))
    if len(outcome.answers) != case.rows * case.repeats:
        outcome.problems.append(f"{case.rows * case.repeats} rollouts were asked for")
    for answer in outcome.answers:
        try:
            check_answer(answer, case)
        except AssertionError as error:
            outcome.problems.append(str(error) or repr(error))
    return outcome


def check_answer(answer: Answer, case: Case) -> None:
    """Raise `AssertionError` where a law is broken."""
    walk = consumed(answer["response"]["output"])
    assert walk, "NeMo RL takes no sample without tokens"
    assert answer["instance_config"]["mask_sample"] == answer["mask_sample"], "the mask is in both places"
    if case.masked is not None:
        assert answer["mask_sample"], "it must be masked"
        assert answer["failure_kind"] == case.masked, f"failure kind {answer['failure_kind']}"
        assert answer["failure_reason"], "the reason is readable"
        return
    assert not answer["mask_sample"], f"masked: {answer['failure_reason']}"
    assert case.reward in (None, answer["reward"]), f"reward {answer['reward']}"
    envelope = answer["training_traces"]
    assert len(envelope["traces"]) >= case.traces, f"{len(envelope['traces'])} traces"
    assert answer["model_calls"] >= case.calls, f"{answer['model_calls']:.0f} model calls"
    trained = {call for trace in envelope["traces"] for call in trace["model_call_ids"]}
    check_envelope(envelope, trained, answer["response"]["metadata"]["session_id"])
    delivered = sum(sum(trace["loss_mask"]) for trace in envelope["traces"])
    assert answer["sampled_tokens"] == delivered + answer["excluded_tokens"], "a sampled token is lost, or given twice"


def show(version: str, policy: str, cases: Sequence[Case] = CASES) -> list[Outcome]:
    """Run the cases under one version, against servers that are started for it."""
    with (
        tempfile.TemporaryDirectory(prefix="show-nemo-") as directory,
        nemo_gym(version, Path(directory) / "work") as gym,
    ):
        config = gym.directory / "agents.yaml"
        config.write_text(yaml.safe_dump({name: _server(settings) for name, settings in AGENTS.items()}))
        shipped = "++polar_swe_agent.responses_api_agents.polar_agent.polar"
        options = [
            *("--environment", "polar_swe", "--model-type", "vllm_model", "--config", str(config)),
            *(f"++policy_base_url={policy}/v1", "++policy_api_key=none", "++policy_model_name=policy"),
            *(f"{shipped}.{key}={_override(value)}" for key, value in VLLM.items()),
        ]
        with serving(gym, *options):
            return [run_case(gym, case) for case in cases]


async def show_on(server: VllmServer, versions: Sequence[str], cases: Sequence[Case]) -> list[Outcome]:
    """Run the cases. vLLM's own grammar has its tiny model call two tools and end; the tokens are still sampled."""
    async with observed(server, SAYS) as (url, _):
        shown = [await asyncio.to_thread(show, version, url, cases) for version in versions]
    return [outcome for outcomes in shown for outcome in outcomes]


def _server(settings: dict[str, Any]) -> dict[str, Any]:
    return {"responses_api_agents": {"polar_agent": {"entrypoint": "app.py", "domain": "coding", **settings}}}


def _override(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_override(inner)}" for key, inner in value.items()) + "}"
    return str(value)


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return a row for each case."""
    table = Table(title="NeMo Gym rollouts", title_justify="left", header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold", justify="right" if heading in FIGURES else "left")
    for outcome in outcomes:
        table.add_row(*outcome.cells())
    return table


def main() -> int:
    newest = max(PYTHONS)
    parser = make_parser(
        "nemo", __doc__, quick=f"all versions except {newest}, all cases except the first two, and most of their rows"
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"only these: {', '.join(PYTHONS)}")
    options = parse(parser)
    versions = options.versions or ([newest] if options.quick else list(PYTHONS))
    python = vllm_python()
    if python is None:
        sys.exit(f"no vLLM here; install it with: {INSTALL_VLLM}")
    if missing := [version for version in versions if not installed(version)]:
        sys.exit(f"no NeMo Gym {', '.join(missing)} here; install it with: {INSTALL}")
    result, cases = Result("nemo", LAWS, options), QUICK if options.quick else CASES
    with tempfile.TemporaryDirectory(prefix="vllm-") as directory, run_server(python, Path(directory)) as server:
        outcomes = asyncio.run(show_on(server, versions, cases))
    make_console().print(table_of(outcomes))
    result.figures["cases"] = [dict(zip(HEADINGS, outcome.cells(), strict=True)) for outcome in outcomes]
    for outcome in outcomes:
        result.check(LAWFUL, [f"{outcome.version}, {outcome.case.title}: {problem}" for problem in outcome.problems])
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
