"""A NeMo Gym resources server is the session's environment: it has the tools, and its `/verify` gives the reward.

The task is a row in NeMo Gym's form. Before the run the server gets the row (`/seed_session`). The row's tools, which
are routes of the server, are offered to the harness over MCP. After the run `/verify` gets the row and a Responses
object made of the session's calls. There, tools have the server's own names, and results are the server's own words.

A server that cannot be reached, or that says itself that its judge failed, masks the episode. Any other failure of
`/verify` may come from the agent's words. The agent is to blame, with a reward of 0, if the server then grades a new
episode in which nothing was done: else an agent could have its episode masked by calling a tool with nonsense.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from polar_gym.errors import ConfigError, explain
from polar_gym.evaluators import EvaluationContext, EvaluatorError, SuspectError
from polar_gym.evaluators.resources_server import TOOL_NAME, AwayError, ResourcesServer
from polar_gym.evaluators.result import kept_log
from polar_gym.harnesses import HARNESSES
from polar_gym.http.urls import is_http_url
from polar_gym.providers.openai_responses.recorded import Item, exchanges, message_item, response
from polar_gym.registry import Names, Options
from polar_gym.schema import EvaluationResult

Finite = Annotated[float, Field(allow_inf_nan=False)]


class NemoGymOptions(Options):
    url: Annotated[str, Names.OTHER]
    """The resources server, e.g. `http://127.0.0.1:8000`."""
    row: dict[str, Any] = Field(default_factory=dict)
    """The task in NeMo Gym's form; tasks bring it."""
    tool_timeout_seconds: float = Field(default=120.0, gt=0)
    """Time for one call of a tool; the agent is told when it is over."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if not is_http_url(self.url) or "@" in self.url:
            raise ValueError(f"url={self.url!r}: expected an http or https URL without a password")
        if self.row and not isinstance(self.row.get("responses_create_params"), dict):
            raise ValueError("row: responses_create_params is missing; it must be an object with input and tools")
        tools = self.row["responses_create_params"].get("tools") or [] if self.row else []
        for place, tool in enumerate(tools):
            name = tool.get("name") if isinstance(tool, dict) and tool.get("type") == "function" else None
            if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
                raise ValueError(
                    f"row.responses_create_params.tools[{place}]={str(tool)[:100]}: expected a function whose name is "
                    "its route: 1 to 48 letters, digits, '_' and '-', and no route that every server has"
                )
        return self

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of the row, as MCP describes tools."""
        return [
            {
                "name": tool["name"],
                "description": tool.get("description") or tool["name"],  # Qwen Code drops a tool without one
                "inputSchema": _without_nulls(tool.get("parameters")) or {"type": "object", "properties": {}},
            }
            for tool in self.row.get("responses_create_params", {}).get("tools") or []
        ]


class Verdict(BaseModel):
    """The fields of a verdict that count; others are for a person."""

    reward: Finite
    reward_components: dict[str, Finite] = {}
    mask_sample: bool | None = None
    failure_reason: str | None = None
    failure_class: str | None = Field(default=None, alias="_ng_failure_class")


class NemoGym:
    Options = NemoGymOptions

    def __init__(self, options: NemoGymOptions) -> None:
        """Take the row. Raises `ConfigError` where there is none."""
        if not options.row:
            raise ConfigError("evaluator.row={}: nemo_gym grades rows in NeMo Gym's form; name such a task file")
        self._options = options
        self.environment = self._episode()

    def _episode(self) -> ResourcesServer:
        options = self._options
        return ResourcesServer(options.url, options.row, options.tools, options.tool_timeout_seconds)

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        if not context.control:
            if self.environment.away:
                raise EvaluatorError(f"{self.environment.away}; the agent called a tool then")
            context.progress.carried = True
            return await self._graded(context, self.environment, self._conversation(context))
        episode = self._episode()
        try:
            await episode.open()
            return await self._graded(context, episode, [message_item("nothing", "")])
        finally:
            await episode.close()

    def _conversation(self, context: EvaluationContext) -> list[Item]:
        """Return the agent's answers, with the tool calls that ran and their results.

        Calls of the environment's tools have the server's names and words; no other call may have such a name.
        """
        prefix = HARNESSES.get(context.request.agent.name).mcp_prefix or ""
        bare = {tool["name"] for tool in self.environment.tools}
        own = [call for call in context.calls if call.outcome == "delivered" and call.kind in ("main", "subagent")]
        turns = [(answer, results) for _, answer, results in exchanges(sorted(own, key=lambda call: call.index))]
        made = [item for answer, _ in turns for item in answer if item["type"] == "function_call"]
        ours = [item for item in made if item["name"].startswith(prefix) and item["name"][len(prefix) :] in bare]
        outputs = {item["call_id"]: item["output"] for _, results in turns for item in results}
        for item in made:
            if item["name"] in bare:
                outputs.pop(item["call_id"], None)
        for item in ours:
            item["name"] = item["name"][len(prefix) :]
        words = self.environment.said([(item["name"], item["arguments"]) for item in ours])
        outputs |= {item["call_id"]: said for item, said in zip(ours, words, strict=True)}
        items: list[Item] = []
        for answer, _ in turns:
            ran = [item for item in answer if outputs.get(item.get("call_id")) is not None]
            items += [item for item in answer if item["type"] != "function_call" or item in ran]
            items += [
                {"type": "function_call_output", "call_id": item["call_id"], "output": outputs[item["call_id"]]}
                for item in ran
            ]
        return items

    async def _graded(
        self, context: EvaluationContext, episode: ResourcesServer, output: list[Item]
    ) -> EvaluationResult:
        session = context.session
        began = min((call.started_at for call in context.calls), default=0.0)
        try:
            status, answer = await episode.verify(
                response(session.session_id, began, context.request.agent.model_name, output)
            )
        except AwayError:
            context.progress.carried = False
            raise
        if status != 200:
            raise _suspect(episode.refused("/verify", status, answer))
        try:
            verdict = Verdict.model_validate_json(answer)
        except ValidationError as error:
            why = "; ".join(explain(error, Verdict).splitlines())
            raise _suspect(episode.refused("/verify", status, why.encode())) from error
        if verdict.mask_sample or verdict.failure_class:
            context.progress.carried = False
            why = verdict.failure_reason or verdict.failure_class or "it gives no reason"
            raise EvaluatorError(f"the resources server masks the episode: {why}")
        told = {
            key: value for key, value in json.loads(answer).items() if key not in {*episode.row, "response", "reward"}
        }
        return EvaluationResult(
            evaluator="nemo_gym",
            reward=verdict.reward,
            components=verdict.reward_components,
            detail=f"the resources server gave {verdict.reward:g}",
            log=kept_log(json.dumps(told)),
        )


def _without_nulls(schema: Any) -> Any:
    """Return a JSON Schema without keys that are null: Arrow gives each object of a column the keys of all others, and
    MCP clients may refuse such a schema."""
    if isinstance(schema, dict):
        return {key: _without_nulls(value) for key, value in schema.items() if value is not None}
    return [_without_nulls(entry) for entry in schema] if isinstance(schema, list) else schema


def _suspect(why: str) -> SuspectError:
    return SuspectError(EvaluationResult(evaluator="nemo_gym", reward=0.0, resolved=False, detail=why))


EVALUATOR = NemoGym
