"""The runtime that chooses one of the others."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from polar_gym.runtimes import RUNTIMES, Runtime, SandboxError, SandboxRequest
from polar_gym.runtimes.auto import CANDIDATES
from polar_gym.schema import PluginSpec, RuntimeSpec


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
