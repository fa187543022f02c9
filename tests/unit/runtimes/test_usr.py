"""Sandboxes without an image show the machine's /usr, and nothing there that an agent must not read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gymnasium
import pytest

from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.node import Node
from polar_gym.runtimes import RUNTIMES, SandboxRequest, agent
from polar_gym.runtimes.apptainer.instance import Instance
from polar_gym.runtimes.kernel.uids import Claim
from polar_gym.schema import RuntimeSpec, Workspace
from tests.support.sessions import task

INSTALLED = Path("/usr/share")
"""Stands for the place of an installed package below /usr: every machine has this directory, and it is not empty."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "OWN", INSTALLED)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("image", [None, "image.sif"])
def test_an_instance_without_an_image_hides_the_package(tmp_path: Path, image: str | None) -> None:
    """Guards against agents in apptainer that read the solutions of the bundled tasks. An image has its own /usr."""
    (tmp_path / "apptainer").mkdir()
    instance = Instance("apptainer", tmp_path, tmp_path, Claim(agent.UID))
    request = SandboxRequest(session_id="s", spec=RuntimeSpec(name="apptainer", image=image), workspace=None)
    binds = instance._binds(cast(Any, SimpleNamespace(glibc=True, git=True)), request)
    covered = f"{tmp_path}/apptainer/nothing:{INSTALLED}:ro" in binds
    assert covered == (image is None)
    assert not covered or binds.index("/usr:/usr:ro") < binds.index(f"{tmp_path}/apptainer/nothing:{INSTALLED}:ro")


def spec(name: str = "bubblewrap", **fields: Any) -> RuntimeSpec:
    return RuntimeSpec.model_validate({"name": name, **fields})


@pytest.mark.parametrize("name", ["apptainer", "auto", "bubblewrap", "docker"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_file_that_sandboxes_show_is_refused(tmp_path: Path, name: str, linked: bool) -> None:
    """Guards against tasks' solutions below /usr/src/app, which every agent of the run could read."""
    path = Path("/usr/src/app/tasks.jsonl")
    if linked:
        (tmp_path / "app").symlink_to(path.parent)
        path = tmp_path / "app" / path.name
    told = rf"tasks\.path=.{path}.: it is below /usr, .*; move it to .* outside, such as /srv, or set runtime\.image"
    with pytest.raises(ConfigError, match=told):
        agent.check_unseen(spec(name), RUNTIMES.get(name), {"tasks.path": path})


@pytest.mark.parametrize(
    ("shown_by", "path"),
    [
        (spec(image="python:3.12"), Path("/usr/src/app")),
        (spec("unconfined"), Path("/usr/src/app")),
        (spec("remote"), Path("/usr/src/app")),
        (spec(), Path("/usrs/app")),
        (spec(), INSTALLED / "tasks" / "suite"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_file_that_no_sandbox_shows_is_taken(shown_by: RuntimeSpec, path: Path) -> None:
    """Guards against a check that refuses images, and the workspaces of the bundled tasks in a package below /usr."""
    agent.check_unseen(shown_by, RUNTIMES.get(shown_by.name), {"runtime.workspace.source": path})


def test_a_node_refuses_what_its_sandboxes_would_show(tmp_path: Path) -> None:
    """Guards against sessions of the service and of gym.make whose agent reads the node's journals, or the source of
    its own workspace with the history that is cut."""
    app = Path("/usr/src/app")
    request = task(runtime=spec(workspace=Workspace(source=str(app))))
    with pytest.raises(ConfigError, match=r"runtime\.workspace\.source='/usr/src/app': "):
        Node(EmbeddedEngine(EmbeddedOptions()), cache=tmp_path).find_plugins(request)
    node = Node(EmbeddedEngine(EmbeddedOptions()), cache=tmp_path, unseen={"rollout.state": app / "state"})
    with pytest.raises(ConfigError, match=r"rollout\.state='/usr/src/app/state': "):
        node.find_plugins(task())
    node.find_plugins(task(runtime=spec("docker", image="python:3.12")))


def test_an_environment_is_not_made_whose_sandboxes_would_show_its_journals() -> None:
    """Guards against gym.make that starts the engine, which may take minutes, before it refuses."""
    with pytest.raises(ConfigError, match=r"rollout\.state='/usr/src/app/state': "):
        gymnasium.make(
            "polar/task",
            instruction="x",
            harness={"name": "command", "command": ["true"]},
            runtime="bubblewrap",
            engine={"name": "embedded", "scripts": [{"commands": ["ls"]}]},
            rollout={"state": "/usr/src/app/state"},
        )
