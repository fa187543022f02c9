"""Tell the date to a harness that has no setting for the date: node or Bun first loads a script that sets its clock.

The real clock stays for programs that the harness starts, for the times of files, and for `Intl.DateTimeFormat` without
a date. Node gets the script on its command line. A program compiled by Bun takes the script from an environment
variable only; the script removes that variable.
"""

from __future__ import annotations

import dataclasses
import time

from polar_gym.harnesses import Harness, Launch, LaunchContext
from polar_gym.harnesses.node import loading_first

_SCRIPT = """\
// Loaded before the harness, so that every sample of a task is told the same date. Between one and twenty-three o'clock
// of that day nothing is changed; else the harness starts at its noon. Time passes as it does.
const launched = {launched};
const noon = new Date({year}, {month} - 1, {day}, 12).getTime();
const shift = Math.abs(launched - noon) < 11 * 3600 * 1000 ? 0 : noon - launched;
if (process.versions.bun) delete process.env.BUN_OPTIONS;
if (shift !== 0) {{
  const clock = Date.now;
  const now = () => clock() + shift;
  const Shifted = new Proxy(Date, {{
    construct: (Real, given, asked) => Reflect.construct(Real, given.length ? given : [now()], asked),
    apply: (Real) => new Real(now()).toString(),
  }});
  Date.now = now;
  Date.prototype.constructor = Shifted;
  globalThis.Date = Shifted;
}}
"""


def told_today(harness: Harness, launch: Launch, context: LaunchContext) -> Launch:
    """Return the launch that tells the harness `spec.today`. For node, argv must begin with node itself."""
    today = context.spec.today
    if today is None or harness.told_today_by is None:
        return launch
    path = f"{context.home}/.polar-gym/clock.cjs"
    launched = int(time.time() * 1000)
    script = _SCRIPT.format(launched=launched, year=today.year, month=today.month, day=today.day)
    if harness.told_today_by == "node":
        return loading_first(launch, path, script)
    environment = {**launch.environment, "BUN_OPTIONS": f"--preload={path}"}
    return dataclasses.replace(launch, environment=environment, files={**launch.files, path: script})
