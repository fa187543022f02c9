"""A rollout server in this process, on a port of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from polar_gym.client import RolloutClient
from polar_gym.http.keys import Keys
from polar_gym.service.process import serving
from polar_gym.service.service import RolloutService
from polar_gym.service.settings import ServeSettings
from tests.lifecycle.nodes import KEY as NODE_KEY

SERVICE_KEY, CALLBACK_KEY = "service-key-0123456789", "callback-key-0123456789"
KEYS = Keys(SERVICE_KEY, NODE_KEY, CALLBACK_KEY)


@asynccontextmanager
async def rollout_server(
    tmp_path: Path, keys: Keys = KEYS, **settings: Any
) -> AsyncIterator[tuple[RolloutService, RolloutClient]]:
    chosen = ServeSettings.model_validate(
        {"listen": "127.0.0.1:0", "state": tmp_path / "state", "cluster": {"name": "none"}, **settings}
    )
    async with serving(chosen, keys) as (service, url), RolloutClient(url, keys.service) as client:
        yield service, client
