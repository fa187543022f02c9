# pyright: reportMissingImports=false
"""Servers of NeMo Gym without its launcher: resources servers that ship with it, and its `simple_agent` before each.

A program for NeMo Gym's own interpreter: `python gym_servers.py SCRIPTS.json ENVIRONMENT...`. It prints the URL of each
server and agent as one line of JSON, and serves until its input ends. The agents' model reads from the scripts, one
tool call a turn, as the scripted policy of the test's harness does.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from omegaconf import OmegaConf
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

MODEL = "model"


def scripted_model(scripts: list[dict[str, Any]]) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/responses")
    async def responses(request: Request) -> dict[str, Any]:
        given = (await request.json())["input"]
        script = next(each for each in scripts if each["match"] in json.dumps(given))
        step = sum(item.get("type") == "function_call" for item in given)
        if step < len(script["calls"]):
            name, arguments = script["calls"][step]
            call = {"type": "function_call", "call_id": f"c{step}", "name": name, "arguments": json.dumps(arguments)}
            output = [call]
        else:
            text = {"type": "output_text", "text": script["final_message"], "annotations": []}
            output = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}]
        fields = {"id": "r", "created_at": 0.0, "model": MODEL, "object": "response", "output": output}
        return {**fields, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}

    return app


def resources_server(environment: str) -> type[SimpleResourcesServer]:
    """Return the class that an environment's `app.py` runs."""
    module = importlib.import_module(f"resources_servers.{environment}.app")
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return next(each for each in own if issubclass(each, SimpleResourcesServer))


async def main(scripts: list[dict[str, Any]], environments: list[str]) -> None:
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    names = [MODEL, *environments, *(f"{each}_agent" for each in environments)]
    listening = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    places = {name: {"host": "127.0.0.1", "port": each.getsockname()[1]} for name, each in listening.items()}
    configs = {name: {"entrypoint": "app.py", "domain": "other", "name": name, **places[name]} for name in names}
    known = OmegaConf.create({name: {"servers": {name: config}} for name, config in configs.items()})
    client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=known)
    apps = {MODEL: scripted_model(scripts)}
    for name in environments:
        server = resources_server(name)
        config = server.model_fields["config"].annotation
        made = server(config=config(**configs[name]), server_client=client)
        apps[name] = made.setup_webserver()
        made.setup_exception_middleware(apps[name])
        references = {
            "resources_server": {"type": "resources_servers", "name": name},
            "model_server": {"type": "responses_api_models", "name": MODEL},
        }
        agent = SimpleAgentConfig(**configs[f"{name}_agent"], **references)
        apps[f"{name}_agent"] = SimpleAgent(config=agent, server_client=client).setup_webserver()
    running = [uvicorn.Server(uvicorn.Config(app, log_level="warning")) for app in apps.values()]
    serving = [asyncio.create_task(each.serve([listening[name]])) for name, each in zip(apps, running, strict=True)]
    print(json.dumps({name: f"http://127.0.0.1:{place['port']}" for name, place in places.items()}), flush=True)  # noqa: T201
    await asyncio.to_thread(sys.stdin.read)
    for each in running:
        each.should_exit = True
    await asyncio.gather(*serving)


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2:]))
