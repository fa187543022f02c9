# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false
# NeMo Gym loads this file. polar-gym's development environment does not have NeMo Gym.
"""The NeMo Gym agent server `polar_agent`: a real harness in a sandbox, against the run's policy model.

`/run` is one episode of polar-gym. The work is done in `polar_gym.nemo`. This file adds NeMo Gym's types.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from fastapi import FastAPI
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from pydantic import ConfigDict, PrivateAttr

from polar_gym.nemo.rollouts import AgentSettings, Rollouts, check_others


class PolarAgentConfig(AgentSettings, BaseResponsesAPIAgentConfig):
    model_config = ConfigDict(extra="allow")


class PolarRunRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow", populate_by_name=True)


class PolarVerifyResponse(BaseVerifyResponse):
    """The answer of `/run`: masks, metrics and `training_traces` beside the fields of its base class."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)


class PolarAgent(SimpleResponsesAPIAgent):
    config: PolarAgentConfig
    ray_enabled: ClassVar[bool | None] = False
    _rollouts: Rollouts = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        check_others(self.config.model_extra or {})
        self._rollouts = Rollouts(self.config)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            async with inner(app) as state:
                try:
                    yield state
                finally:
                    await self._rollouts.close()

        app.router.lifespan_context = lifespan
        return app

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        raise NotImplementedError

    async def run(self, body: PolarRunRequest) -> PolarVerifyResponse:
        answer = await self._rollouts.run(body.model_dump(mode="json", exclude_unset=True))
        return PolarVerifyResponse.model_validate(answer)


if __name__ == "__main__":
    PolarAgent.run_webserver()
