"""The runtime that chooses one of the others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from polar_gym.errors import ConfigError
from polar_gym.runtimes import RUNTIMES, Runtime, SandboxError, SandboxRequest, check_offered
from polar_gym.runtimes.auto import CANDIDATES, Auto, AutoOptions
from polar_gym.schema import PluginSpec, RuntimeSpec, Workspace


async def test_no_runtime_takes_away_by_what_another_finds_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against instances and control groups that stayed, because Docker had removed their scratch directory."""
    asked, stuck = list[str](), False

    async def reap(runtime: Runtime, session_ids: Collection[str]) -> int:
        asked.append(type(runtime).__name__)
        if stuck and len(asked) == 1:
            raise SandboxError("an instance does not end")
        return len(session_ids)

    for name in CANDIDATES:
        kind = RUNTIMES.get(name)
        monkeypatch.setattr(kind, "check", lambda _: [])
        monkeypatch.setattr(kind, "reap", reap)
    assert await RUNTIMES.make(PluginSpec(name="auto")).reap(["s"]) == 3
    assert asked == ["Apptainer", "Bubblewrap", "Docker"]
    asked, stuck = [], True
    with pytest.raises(SandboxError, match="an instance does not end"):
        await RUNTIMES.make(PluginSpec(name="auto")).reap(["s"])
    assert asked == ["Apptainer", "Bubblewrap", "Docker"], "the others' sandboxes do not stay"


@pytest.mark.parametrize("name", ["auto", "bubblewrap", "unconfined"])
async def test_no_sandbox_without_images_stands_in_for_an_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a task that runs on the programs of the machine, and is graded so."""
    for other in ("docker", "apptainer"):
        monkeypatch.setattr(RUNTIMES.get(other), "check", lambda _: ["missing"])
    options = {"accept_no_isolation": True} if name == "unconfined" else {}
    spec = RuntimeSpec.model_validate({"name": name, "image": "foo", **options})
    with pytest.raises(SandboxError, match=r"(bubblewrap|unconfined) runs no images; set runtime=docker"):
        await RUNTIMES.make(spec).start(SandboxRequest(session_id="s", spec=spec, workspace=None))


async def test_a_daemon_that_comes_up_later_is_found_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a daemon that was starting with the gateway, and was not asked again: all tasks with an image
    failed. Sandboxes without one stay where they were: samples of one task have one kind of sandbox."""
    lacks = {"docker": ["a daemon"], "apptainer": ["it"], "bubblewrap": []}
    for name in CANDIDATES:
        monkeypatch.setattr(RUNTIMES.get(name), "check", lambda _, own=name: [*lacks[own]])
    auto = Auto(AutoOptions())
    found = [type(await auto._choose(image=image)).__name__ for image in (False, True)]
    lacks["docker"] = []
    found += [type(await auto._choose(image=image)).__name__ for image in (True, False)]
    assert found == ["Bubblewrap", "Bubblewrap", "Docker", "Bubblewrap"]


@pytest.mark.parametrize("hidden", [{"base_patch": "x"}, {"hidden_files": ["tests/test_a.py"]}])
def test_no_container_that_is_left_whole_has_hidden_files(hidden: dict[str, Any]) -> None:
    """Guards against hidden tests that stay before the harness, which is root."""
    spec = RuntimeSpec(name="docker", image="foo", scope="container", workspace=Workspace.model_validate(hidden))
    with pytest.raises(ConfigError, match="base_patch and hidden_files have no effect"):
        check_offered(spec, RUNTIMES.get("docker"))
