"""A request is data: it chooses no code, file, program or network of the machine that runs it, on no way in."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar_gym.cli import main
from polar_gym.client import RolloutClient
from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.assemble import load_tasks, make_request
from polar_gym.http.keys import NODE_KEY, SERVICE_KEY, Keys
from polar_gym.schema import EvaluatorSpec, HarnessSpec, RuntimeSpec, StartFrom, TaskRequest
from tests.lifecycle.nodes import KEY, Client, node_here, order
from tests.lifecycle.service_fixtures import KEYS, rollout_server
from tests.support.requirements import need_bubblewrap
from tests.support.resources_server import row
from tests.support.sessions import task

NO_KEYS = Keys()


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    need_bubblewrap()


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`named_code` can be imported, which leaves the file that this gives."""
    mark = tmp_path / "imported"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "named_code.py").write_text(
        f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n"
        "from polar_gym.evaluators.session_completion import EVALUATOR\n"
        "def parse(log): return {'t': 'PASSED'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    sys.modules.pop("named_code", None)
    return mark


@dataclass
class Service:
    """A server, and a node that belongs to it as far as a request can tell."""

    server: RolloutClient
    node: Client
    requests: int = 0

    async def answers(self, request: TaskRequest) -> list[tuple[int, str]]:
        """Status and error of the server's answer, and of the node's."""
        self.requests += 1
        named = request.model_copy(update={"task_id": f"t{self.requests}"})
        headers = {"Authorization": f"Bearer {KEYS.service}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{self.server.url}/v1/tasks", data=named.to_json()) as response,
        ):
            server = response.status, (await response.json()).get("error", "")
        status, body = await self.node.put(order(f"s{self.requests}", request=named))
        return [server, (status, body.get("error", ""))]

    async def refusal(self, request: TaskRequest) -> str:
        """The error, which names what is refused."""
        (by_server, error), (by_node, again) = await self.answers(request)
        assert (by_server, by_node) == (422, 422), (error, again)
        assert "\n" not in error + again
        assert error in again, (error, again)
        return error


@asynccontextmanager
async def service(tmp_path: Path, keys: Keys = KEYS, **settings: Any) -> AsyncIterator[Service]:
    async with (
        rollout_server(tmp_path / "server", keys, **settings) as (_, client),
        node_here(tmp_path / "node", key=keys.node and KEY, **settings) as (_, node),
    ):
        yield Service(client, node)


def evaluated(**fields: Any) -> TaskRequest:
    return task(evaluator=EvaluatorSpec.model_validate(fields))


def run_in(**fields: Any) -> TaskRequest:
    return task(runtime=RuntimeSpec.model_validate({"name": "bubblewrap", **fields}))


GRADING = {"name": "test_on_output", "command": "true", "log_parser": "named_code:parse"}
HIDDEN = {"name": "swe", "FAIL_TO_PASS": ["t"], "test_command": "true", "log_parser": "named_code:parse"}
RUBRIC = {"name": "rubric", "url": "http://example.org", "model": "m", "criteria": [{"name": "a", "text": "A."}]}
PART = {"name": "composite", "components": {"tests": GRADING}}
IMPORTS: dict[str, Callable[[], TaskRequest]] = {
    "evaluator.log_parser='named_code:parse'": lambda: evaluated(**GRADING),
    "evaluator.components.tests.log_parser='named_code:parse'": lambda: evaluated(**PART),
    "evaluator.components.all.components.tests.log_parser=": lambda: evaluated(
        name="composite", components={"all": PART}
    ),
    "evaluator.components.own.name='named_code:EVALUATOR'": lambda: evaluated(
        name="composite", components={"own": {"name": "named_code:EVALUATOR"}}
    ),
    "evaluator.name='named_code:EVALUATOR'": lambda: evaluated(name="named_code:EVALUATOR"),
    "agent.name='named_code:HARNESS'": lambda: task(agent=HarnessSpec(name="named_code:HARNESS")),
    "runtime.name='named_code:RUNTIME'": lambda: task(runtime=RuntimeSpec(name="named_code:RUNTIME")),
    "agent.target='named_code:parse'": lambda: task(
        agent=HarnessSpec.model_validate({"name": "python", "target": "named_code:parse"})
    ),
    "agent.target='/usr/lib/python3/any.py:f'": lambda: task(
        agent=HarnessSpec.model_validate({"name": "python", "target": "/usr/lib/python3/any.py:f"})
    ),
}


async def test_a_request_names_no_code(tmp_path: Path, code: Path) -> None:
    """Guards against requests that run any function of the machine as the gateway's user, or show its modules."""
    async with service(tmp_path) as both:
        for named, make in {**IMPORTS, "evaluator.log_parser='os:system'": _executes}.items():
            error = await both.refusal(make())
            assert error.endswith(f"imports={error.partition('=')[2].split(chr(39))[1]}")
            assert named in error
    assert not code.exists(), "a refused request was imported"


def _executes() -> TaskRequest:
    return evaluated(**{**GRADING, "log_parser": "os:system"})


async def test_the_operator_may_allow_code_by_its_path(tmp_path: Path, code: Path) -> None:
    """By a setting of the process, or because the node's own run names it."""
    request = evaluated(**GRADING)
    async with service(tmp_path, imports="named_code:parse,named_code:other") as both:
        assert [status for status, _ in await both.answers(request)] == [201, 201]
        await both.refusal(evaluated(name="named_code:EVALUATOR"))
    async with node_here(tmp_path / "own", config={"evaluator": GRADING}) as (_, node):
        assert (await node.put(order(request=request)))[0] == 201
        assert (await node.put(order("other", request=_executes())))[0] == 422


async def test_a_request_names_no_files_programs_and_networks(tmp_path: Path) -> None:
    """Guards against requests that show the agent the machine's files, or start what they name in Apptainer's place."""
    refused = {
        "runtime.workspace.source='/etc'": run_in(workspace={"source": "/etc"}),
        "runtime.image='/etc'": run_in(name="apptainer", image="/etc"),
        "runtime.image='/x.tar'": run_in(name="apptainer", image="docker-archive:/x.tar"),
        "runtime.image='--fakeroot://x'": run_in(name="auto", image="--fakeroot://x"),
        "runtime.workspace.python_requirements='x @ file:///x'": run_in(
            workspace={"python_requirements": ["attrs", "x @ file:///x"]}
        ),
    }
    by_the_node = {
        "runtime.scratch='/var'": run_in(scratch="/var"),
        "runtime.images='/var'": run_in(name="apptainer", images="/var"),
        "runtime.program='/bin/sh'": run_in(name="apptainer", program="/bin/sh"),
        "runtime.host='tcp://example.org'": run_in(name="docker", host="tcp://example.org"),
        "runtime.bridge='host'": run_in(name="docker", bridge="host"),
        """runtime.build_args='{"A": "1"}'""": run_in(name="docker", build_args={"A": "1"}),
        "runtime.scope='container'": run_in(name="docker", scope="container"),
        "evaluator.url='http://example.org'": evaluated(**RUBRIC),
        "evaluator.url='http://127.0.0.1:1'": evaluated(name="nemo_gym", url="http://127.0.0.1:1", row=row(6)),
        "evaluator.components.own.api_key_env='POLAR_GYM_NODE_KEY'": evaluated(
            name="composite", components={"own": {**RUBRIC, "url": None, "api_key_env": "POLAR_GYM_NODE_KEY"}}
        ),
    }
    async with service(tmp_path) as both:
        for named, request in refused.items():
            assert named in await both.refusal(request)
        for named, request in by_the_node.items():
            assert named in (await both.answers(request))[1][1]


async def test_a_scratch_directory_of_the_config_is_no_workspace(tmp_path: Path) -> None:
    """Guards against requests that show one agent the files of the others' sandboxes."""
    scratch = str(tmp_path / "scratch")
    Path(scratch, "other-session").mkdir(parents=True)
    own = {"runtime": {"name": "bubblewrap", "scratch": scratch}}
    async with node_here(tmp_path / "node", config=own) as (_, node):
        assert (await node.put(order("same", request=run_in(scratch=scratch))))[0] == 201
        for number, fields in enumerate(
            ({"workspace": {"source": f"{scratch}/other-session"}}, {"scratch": f"{scratch}/other-session"})
        ):
            status, body = await node.put(order(f"s{number}", request=run_in(**fields)))
            assert status == 422, body


async def test_an_allowed_directory_ends_at_its_links(tmp_path: Path) -> None:
    """Guards against a workspace whose `.git` is another repository of the machine."""
    allowed = tmp_path / "allowed"
    (allowed / "linked").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (allowed / "linked" / ".git").symlink_to(tmp_path / "secret")
    async with service(tmp_path, directories=[allowed]) as both:
        for path in (allowed / ".." / "secret", allowed / "linked"):
            assert f"runtime.workspace.source='{path}'" in await both.refusal(run_in(workspace={"source": str(path)}))


async def test_what_is_allowed_and_the_bundled_tasks_are_taken(tmp_path: Path) -> None:
    (tmp_path / "allowed" / "work").mkdir(parents=True)
    config = load_config("demo", ["harness=command", "harness.command=[sh]"])
    bundled = [make_request(config, each) for each in load_tasks(config)]
    defaults = run_in(name="apptainer", program="apptainer", scratch=None)
    own = run_in(workspace={"source": f"{tmp_path}/allowed/work"})
    async with service(tmp_path, directories=str(tmp_path / "allowed")) as both:
        for request in (*bundled, own, defaults):
            assert [status for status, _ in await both.answers(request)] == [201, 201]


async def test_an_agent_does_not_reach_a_port_without_a_key(tmp_path: Path) -> None:
    """Guards against an agent that posts a task from inside its sandbox and so leaves it."""
    shared = [run_in(name=name, network="full") for name in ("bubblewrap", "apptainer", "auto")]
    async with service(tmp_path, NO_KEYS) as both:
        for request in shared:
            error = await both.refusal(request)
            assert "runtime.network='full'" in error
            assert all(fix in error for fix in (SERVICE_KEY, NODE_KEY, "runtime=docker"))
        docker = await both.answers(run_in(name="docker", network="full"))
        assert [status for status, _ in docker] == [201, 201]
    async with service(tmp_path / "keys") as both:
        for request in shared:
            assert [status for status, _ in await both.answers(request)] == [201, 201]
    for keys in (Keys(service=KEYS.service), Keys(node=KEYS.node)):
        async with rollout_server(tmp_path / f"{keys.node}", keys) as (_, client):
            with pytest.raises(Exception, match="a harness reaches the ports of this machine"):
                await client.submit(shared[0])


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_a_service_without_keys_does_not_begin_with_a_shared_network(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in (NODE_KEY, SERVICE_KEY):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises((SystemExit, ConfigError)) as ended:
        main([command, "listen=127.0.0.1:0", f"state={tmp_path}/state", "runtime=bubblewrap", "runtime.network=full"])
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == 2
    assert "runtime.network='full': with runtime=bubblewrap a harness reaches" in capsys.readouterr().err.replace(
        "\n", " "
    )


async def test_a_request_owns_no_record_and_starts_only_from_allowed_directories(tmp_path: Path) -> None:
    record = tmp_path / "state" / "sessions" / "s1.1"
    record.mkdir(parents=True)
    branched = task().model_copy(update={"start_from": StartFrom(record=str(record))})
    owned = task().model_copy(update={"start_from": StartFrom(record=str(record), owned=True)})
    async with service(tmp_path) as closed:
        assert "start_from.record" in await closed.refusal(branched)
    async with service(tmp_path / "other", directories=[tmp_path / "state"]) as opened:
        assert "start_from.owned=true" in await opened.refusal(owned)
        assert all(status != 422 for status, _ in await opened.answers(branched))
