"""Run the rollouts of an agent server until it is killed: `python -m tests.lifecycle.held_agent_server SETTINGS`.

SETTINGS: JSON of the section `polar`. One row is rolled out.
"""

from __future__ import annotations

import asyncio
import json
import sys

from polar_gym.nemo.rollouts import AgentSettings, Rollouts
from polar_gym.nemo.rows import row
from polar_gym.tasks.bundled import BundledTasks

if __name__ == "__main__":
    settings = AgentSettings(polar=json.loads(sys.argv[1]))
    asyncio.run(Rollouts(settings).run(row(BundledTasks(BundledTasks.Options()).load()[0])))
