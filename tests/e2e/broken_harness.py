"""Harnesses that misbehave, named in configs by import path."""

from __future__ import annotations

import dataclasses

from polar_gym.harnesses import Launch, LaunchContext
from polar_gym.harnesses.pi import HARNESS as PI


def _crash(context: LaunchContext) -> Launch:
    return Launch(argv=["sh", "-c", "echo 'cannot find my left shoe' >&2; exit 3"])


CRASHING = dataclasses.replace(PI, launch=_crash, told_today_by=None, mcp_prefix=None)
