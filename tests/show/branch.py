"""Branch an episode of every harness at each turn, on a real vLLM: `make show-branch`.

The policy is a tiny random model under a grammar (`tests.e2e.steered_engine`), which calls the harness's shell tool
some turns long. The harnesses, the branches and the engine are real; vLLM tells what it had in its prefix cache.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from polar_gym.config.loading import load_config
from polar_gym.console import make_console
from polar_gym.episodes.reading import read_calls
from polar_gym.episodes.verify import verify
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.gateway.session.branching import branch_of, branching_points
from polar_gym.schema import Episode, ModelCall
from tests.e2e.vllm_server import INSTALL, run_server, vllm_python
from tests.e2e.vllm_work import sampled_tokens
from tests.show.result import OF_NPM, Result, make_parser, parse

ENDED, EXACT, ONCE, BEGIN, LIVE = LAWS = (
    "every episode and every branch ends without a failure",
    "verify finds no fault in an episode with its branches",
    "each token that the engine sampled is trained once, by the session that sampled it",
    "a branch has the recorded calls, and goes on from their ids",
    "the engine samples nothing that the record has",
)
ENGINE = "tests.e2e.steered_engine:SteeredReplicas"


async def branched(harness: str, url: str, options: Any, state: str) -> tuple[Episode, list[Episode], float]:
    """Return an episode, its branches at each turn, and how many tokens the engine sampled for them."""
    settings = [
        *(f"harness={harness}", "harness.profile=lean", "runtime=bubblewrap", "evaluator=session_completion"),
        *("engine=vllm", f"engine.name={ENGINE}", f"engine.url={url}", f"+engine.turns={options.turns}"),
        *(f"rollout.state={state}", "rollout.timeout_seconds=900", "scoring.share=null"),
    ]
    config = load_config(None, settings)
    task = load_tasks(config)[0]
    async with make_node(config, [task]) as node:
        before = await asyncio.to_thread(sampled_tokens, url)  # the node's own probes are over
        episode = await node.rollout(make_request(config, task))
        points = [point for point in branching_points(read_calls(episode), "each-turn") for _ in range(options.samples)]
        requests = [branch_of(episode, point) for point in points]
        branches = [node.rollout(request, number) for number, request in enumerate(requests, 1)]
        ended = await asyncio.gather(*branches)
        return episode, ended, await asyncio.to_thread(sampled_tokens, url) - before


def check(harness: str, episode: Episode, branches: Sequence[Episode], sampled: float, result: Result) -> None:
    """Check the laws, and keep the figures."""
    group = [episode, *branches]
    failed = [each.session for each in group if each.session.failure is not None]
    result.check(ENDED, [f"{harness}, {each.session_id}: {each.failure}" for each in failed])
    result.check(EXACT, [f"{harness}: {line}" for line in asyncio.run(verify(group, None)).broken])
    calls = [read_calls(each) for each in group]
    own = {call.call_id: len(call.response_ids) for each in calls for call in each if call.replayed is None}
    trained = sum(trace.trainable_tokens for each in group for trace in each.trajectory.traces)
    excluded = sum(sum(each.trajectory.fidelity.excluded.values()) for each in group)
    excluded -= sum(each.trajectory.fidelity.excluded.get("branched", 0) for each in branches)
    result.check(
        ONCE,
        [f"{harness}: {trained} trained + {excluded} excluded of {sum(own.values())} sampled"]
        * (trained + excluded != sum(own.values())),
    )
    result.check(
        LIVE, [f"{harness}: {sampled:g} sampled, {sum(own.values())} in the books"] * (sampled != sum(own.values()))
    )
    recorded = {call.call_id: call for call in calls[0]}
    for branch, made in zip(branches, calls[1:], strict=True):
        result.check(
            BEGIN, [f"{harness}, {branch.session.session_id}: {line}" for line in wrong(branch, made, recorded)]
        )
    result.figures[harness] = figures_of(episode, branches, calls)


def wrong(branch: Episode, calls: Sequence[ModelCall], recorded: Mapping[str, ModelCall]) -> list[str]:
    """Return what is wrong with the beginning of a branch, a line each."""
    start = branch.request.start_from
    assert start is not None
    replayed = [call for call in calls if call.replayed is not None]
    lines = [f"{len(replayed)} of {start.calls} recorded calls"] * (len(replayed) != start.calls)
    lines += [f"call {call.index} is another one" for call in replayed if not same_ids(call, recorded[call.call_id])]
    first = next((call for call in calls if call.replayed is None), None)
    if first is None:
        return [*lines, "nothing was sampled"]
    parent = recorded.get(first.parent_id or "")
    seen = np.concatenate([parent.prompt_ids, parent.response_ids]) if parent else np.empty(0, np.int32)
    if not len(seen) or not np.array_equal(first.prompt_ids[: len(seen)], seen):
        lines.append(f"call {first.index} does not begin with the recorded ids")
    return lines


def same_ids(call: ModelCall, other: ModelCall) -> bool:
    return np.array_equal(call.prompt_ids, other.prompt_ids) and np.array_equal(call.response_ids, other.response_ids)


def figures_of(episode: Episode, branches: Sequence[Episode], calls: Sequence[Sequence[ModelCall]]) -> dict[str, Any]:
    """Return the figures of an episode and its branches; `calls` are those of each."""
    replayed = [call for each in calls for call in each if call.replayed is not None]
    asked = [call for each in calls for call in each if call.replayed is None]
    first = [new[0] for each in calls[1:] if (new := [call for call in each if call.replayed is None])]
    by_turn: dict[str | None, list[bytes]] = {}
    for call in first:
        by_turn.setdefault(call.parent_id, []).append(call.response_ids.tobytes())
    return {
        "turns": len(calls[0]),
        "branches": len(branches),
        "failed": sum(each.session.failure is not None for each in [episode, *branches]),
        "different_answers_a_turn": round(float(np.mean([len(set(said)) for said in by_turn.values()])), 2),
        "tokens_sampled": sum(len(call.response_ids) for call in asked),
        "tokens_not_sampled_again": sum(len(call.response_ids) for call in replayed),
        "prompt_tokens": sum(len(call.prompt_ids) for call in asked),
        "prompt_tokens_cached": sum(call.cached_tokens or 0 for call in asked),
        "prompt_tokens_not_asked_again": sum(len(call.prompt_ids) for call in replayed),
        "first_prompts_cached": share(sum(call.cached_tokens or 0 for call in first), first),
        "prompts_cached": share(sum(call.cached_tokens or 0 for call in asked), asked),
        "gateway_ms_a_call": round(
            1000 * float(np.median([call.replayed.seconds for call in replayed if call.replayed] or [0.0])), 1
        ),
    }


def share(tokens: int, calls: Sequence[ModelCall]) -> float:
    """Return the part of the calls' prompts that so many tokens are."""
    return round(tokens / max(1, sum(len(call.prompt_ids) for call in calls)), 4)


def table_of(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = (
        "turns",
        "branches",
        "answers a turn",
        "sampled",
        "not sampled again",
        "prompts",
        "cached",
        "first prompts cached",
    )
    table = Table("harness", *columns, title="One episode of each harness, branched at each turn (tokens)")
    for harness, each in figures.items():
        table.add_row(
            harness,
            str(each["turns"]),
            str(each["branches"]),
            str(each["different_answers_a_turn"]),
            str(each["tokens_sampled"]),
            str(each["tokens_not_sampled_again"]),
            str(each["prompt_tokens"]),
            f"{each['prompts_cached']:.1%}",
            f"{each['first_prompts_cached']:.1%}",
        )
    return table


def main() -> int:
    parser = make_parser("branch", __doc__, quick="four harnesses, one turn, and two samples of each turn")
    parser.add_argument("--harness", action="append", choices=OF_NPM, help="only this one; may be given repeatedly")
    parser.add_argument("--turns", type=int, default=4, help="with a tool call (default %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="branches at each turn (default %(default)s)")
    parser.set_defaults(harness=OF_NPM)
    options = parse(parser, quick={"harness": ["pi", "codex"], "turns": 3, "samples": 2})
    result = Result("branch", LAWS, options)
    python = vllm_python()
    if python is None:
        sys.exit(f"no vLLM: {INSTALL}")
    with (
        tempfile.TemporaryDirectory(prefix="pg-branch-") as directory,
        run_server(python, Path(directory), flags=["--enable-prompt-tokens-details"]) as server,
    ):
        for harness in options.harness:
            state = f"{directory}/{harness}"
            check(harness, *asyncio.run(branched(harness, server.url, options, state)), result)
    make_console().print(table_of(result.figures))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
