"""Show which promises hold between the gateway and each harness: `make show-harness-check`.

The rows are those of `polar-gym harness check`: the real harness in a real sandbox against the real gateway, with a
scripted policy. `--newest` takes the newest published versions in place of the pinned ones.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, replace

from rich.table import Table

from polar_gym.conformance.checks import CHECKS, Report, report
from polar_gym.conformance.versions import newest
from polar_gym.console import make_console
from polar_gym.harnesses import HARNESSES as REGISTRY
from tests.show.result import HARNESSES, Result, make_parser, parse

(HOLDS,) = LAWS = ("no row of any harness fails, except those of known limits",)

LIMITS = {("qwen_code", "sub-agents"): "nothing in a request of a sub-agent tells who asks"}
"""Known failures: harness and row -> the reason."""

SIGNS = {"pass": "ok", "fail": "FAILS", "n/a": "-"}


def show(reports: list[Report]) -> Table:
    table = Table("check", *(f"{each.harness} {each.version}" for each in reports), title="What holds for each harness")
    verdicts = [{row.check: SIGNS[row.verdict] for row in each.rows} for each in reports]
    for check in CHECKS:
        table.add_row(check, *(each.get(check, "not installed") for each in verdicts))
    return table


def unknown(found: Report) -> list[str]:
    """Return the failed rows that are no known limit."""
    return [each for each in found.failed if (found.harness, each.partition(":")[0]) not in LIMITS]


def main() -> int:
    parser = make_parser("harness-check", __doc__, quick="all harnesses except pi")
    parser.add_argument("--harness", action="append", choices=HARNESSES, help="only this one; may be given repeatedly")
    parser.add_argument("--newest", action="store_true", help="check the newest published versions")
    parser.add_argument("--runtime", default="bubblewrap", help="the kind of sandbox (default: %(default)s)")
    parser.set_defaults(harness=HARNESSES)
    options = parse(parser, quick={"harness": ["pi"]})
    result = Result("harness-check", LAWS, options)
    console = make_console()
    reports = []
    for name in options.harness:
        harness = REGISTRY.get(name)
        if options.newest:
            harness = replace(harness, version=newest(harness))
        found = asyncio.run(report(name, harness, options.runtime, CHECKS, lambda check: None))
        result.check(HOLDS, [f"{name} {harness.version}: {each}" for each in unknown(found)])
        result.figures[name] = asdict(found)
        reports.append(found)
    console.print(show(reports))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
