"""What an agent could leave in its workspace to be rewarded for nothing: each attack, and what the attack tries.

All attacks run on a task that the agent has not solved. Each module of this package holds the attacks of one kind.
"""

from __future__ import annotations

from tests.lifecycle.attacks import adaptive, copies, files, javascript, machinery, preparation, process
from tests.lifecycle.attacks.attack import Attack as Attack
from tests.lifecycle.attacks.grounds import GROUNDS as GROUNDS
from tests.lifecycle.attacks.grounds import Ground as Ground
from tests.lifecycle.attacks.grounds import task_for as task_for

ATTACKS = [
    *files.ATTACKS,
    *process.ATTACKS,
    *machinery.ATTACKS,
    *preparation.ATTACKS,
    *adaptive.ATTACKS,
    *copies.ATTACKS,
    *javascript.ATTACKS,
]
