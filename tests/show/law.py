"""Show that a step's gradient does not depend on how sessions are packed, trainer by trainer: `make show-law`.

The table has the relative difference between the gradient of one step and that of the whole sessions, the largest of
all seeds: adapters x losses x weightings x splits. Our arrays must obey the law, and known bugs of trainers must not.
TRL, AReaL, prime-rl and verl are tried where this interpreter finds them (`trainers.py` and `verl_trainer.py` of
`tests/support` say what they need). NeMo RL is tried with `NEMO_RL=DIRECTORY`, a checkout of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from polar_gym.console import make_console
from polar_gym.training.batch import Weighting
from polar_gym.training.conformance import LOSSES, TOLERANCE, Adapter, TokenLoss, check, train_arrays
from tests.e2e.vllm_server import INSTALL, vllm_python
from tests.nemo_rl import environment
from tests.show.result import Result, make_parser, parse
from tests.support import nemo_rl_loss, packing_bugs, trainers, verl_trainer
from tests.support.forests import train_forest
from tests.support.tiny_model import tiny_gpt2

HELD, CAUGHT, KNOWN = LAWS = (
    "the arrays and the prefix forest obey the law of the packing",
    "each known bug is caught",
    "trainers obey the law, but for the limits that are known",
)
PPO, GSPO = {"ppo": LOSSES["ppo"]}, {"gspo": LOSSES["gspo"]}


@dataclass(frozen=True)
class Case:
    """An adapter, and the law that says what becomes of its gradients."""

    name: str
    adapter: Adapter
    losses: Mapping[str, TokenLoss]
    law: str
    limits: frozenset[tuple[str, str]] = frozenset()
    """Losses and weightings that the trainer cannot do over sessions."""
    weightings: Sequence[Weighting] = ("token", "session")
    needs: str = "torch"


def cases() -> list[Case]:
    limits = frozenset({("gspo", "token"), ("gspo", "session"), ("kl", "session")})
    every = [
        Case("arrays", train_arrays, LOSSES, HELD),
        Case("prefix forest", train_forest, LOSSES, HELD),
        Case("rows divided (agent-lightning #593)", packing_bugs.divided_by_rows, PPO, CAUGHT, weightings=["session"]),
        Case(
            "means of micro-batches (TRL #7206)", packing_bugs.mean_of_micro_batches, PPO, CAUGHT, weightings=["token"]
        ),
        Case(
            "steps by rows (agentcore #131)",
            packing_bugs.a_step_for_every_eight_rows,
            PPO,
            CAUGHT,
            weightings=["token"],
        ),
        Case("ratios of rows", packing_bugs.ratio_of_each_row, GSPO, CAUGHT),
        Case("TRL GRPOTrainer", trainers.trl_grpo, LOSSES, KNOWN, limits, needs="trl"),
        Case("TRL AsyncGRPOTrainer", trainers.trl_one_accumulation_step, PPO, KNOWN, needs="trl"),
        Case("AReaL tree training", trainers.areal_trees, PPO, KNOWN, needs="areal"),
        Case("NeMo RL", nemo_rl_loss.nemo_rl, nemo_rl_loss.LOSSES_OF_SESSIONS, KNOWN, limits, needs="nemo_rl"),
    ]
    every += [Case("prime-rl", trainers.prime_rl, {"own": trainers.prime_rl_loss}, KNOWN, needs="prime_rl")]
    limits = frozenset({("gspo", "token"), *((loss, "session") for loss in LOSSES)})
    rows = verl_trainer.verl_mini_batches_of_eight
    return [
        *every,
        Case("verl, one mini-batch", verl_trainer.verl, LOSSES, KNOWN, limits, needs="verl"),
        Case("verl, mini-batches of 8 rows", rows, PPO, CAUGHT, weightings=["token"], needs="verl"),
    ]


Differences = dict[tuple[str, str], dict[str, float]]
"""(loss, weighting) -> split -> the largest relative difference."""


def differences(case: Case, model: Any, seeds: int) -> Differences:
    largest: Differences = {}
    for seed in range(seeds):
        for found in check(
            case.adapter, model, vocabulary=32, losses=case.losses, weightings=case.weightings, seed=seed
        ):
            splits = largest.setdefault((found.loss, found.weighting), {})
            splits[found.split] = max(found.difference, splits.get(found.split, 0.0))
    return largest


def breaches(case: Case, found: Differences) -> list[str]:
    broken = {pair for pair, splits in found.items() if max(splits.values()) >= TOLERANCE}
    if case.law == CAUGHT:
        return [] if broken else [f"{case.name}: no split shows it"]
    return [f"{case.name}, {loss}, {weighting}: breaks the law" for loss, weighting in sorted(broken - case.limits)]


def main() -> int:
    parser = make_parser("law", __doc__, quick="all seeds but one")
    parser.add_argument("--seeds", type=int, default=5, help="choices of sessions and splits (default: %(default)s)")
    options = parse(parser, quick={"seeds": 1})
    if importlib.util.find_spec("torch") is None:
        if checkout := os.environ.get("NEMO_RL"):
            return environment.main(Path(checkout).resolve(), ["law", *sys.argv[1:]])
        python = vllm_python() or sys.exit(f"torch is missing; install it with: {INSTALL}")
        return subprocess.run([python, "-m", "tests.show.law", *sys.argv[1:]], check=False).returncode
    importlib.import_module("torch").set_num_threads(1)  # threads cost more than these sums
    result, model = Result("law", LAWS, options), tiny_gpt2()
    splits = ("a row per trace", "longer padding", "traces cut into rows", "uneven micro-batches", "uneven ranks")
    table = Table("adapter", "loss", "weights", *splits, title="relative difference of the gradient")
    result.check(KNOWN, [])
    for case in cases():
        if importlib.util.find_spec(case.needs) is None:
            table.add_row(f"{case.name}: {case.needs} is not here")
            continue
        found = differences(case, model, options.seeds)
        result.check(case.law, breaches(case, found))
        result.figures[case.name] = {f"{loss}, {weighting}": each for (loss, weighting), each in found.items()}
        for (loss, weighting), each in found.items():
            table.add_row(case.name, loss, weighting, *(f"{each[split]:.0e}" for split in splits))
    make_console().print(table)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
