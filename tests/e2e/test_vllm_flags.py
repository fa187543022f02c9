"""A vLLM whose own flags spoil the record: the start probe finds them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polar_gym.inference import EngineError
from polar_gym.inference.vllm import VllmEngine, VllmOptions
from tests.e2e.vllm_server import INSTALL, VllmServer, run_server, vllm_python
from tests.requirements import need

FLAGS = ("--tool-strict-level", "function", "--logprobs-mode", "processed_logits")


@pytest.fixture(scope="module")
def spoilt_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One server with both flags: starting one takes most of a minute."""
    python = vllm_python()
    need(python, "a real vLLM", INSTALL)
    assert python is not None
    with run_server(python, tmp_path_factory.mktemp("spoilt"), flags=FLAGS) as server:
        yield server


async def test_logits_in_place_of_logprobs_are_refused_at_the_start(spoilt_server: VllmServer) -> None:
    """Guards against a probe that takes logits for processed logprobs, because they too scale with temperature."""
    engine = VllmEngine(VllmOptions(url=spoilt_server.url))
    with pytest.raises(EngineError, match=r"these are logits.*start it with --logprobs-mode processed_logprobs"):
        await engine.start()
