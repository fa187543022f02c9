"""`polar-gym learn`: train a policy through a real harness."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.console import console, errors
from polar_gym.errors import ConfigError
from polar_gym.learning.families import FAMILIES
from polar_gym.learning.grpo import GradientError, LogprobsDifferError, Settings
from polar_gym.learning.model import Size
from polar_gym.learning.report import print_run
from polar_gym.learning.run import Plan, Run
from polar_gym.schema import Sampling

app = typer.Typer()

_UNUSED = {
    "rollout.num_samples": f"a group has {Settings().samples} sessions of a task",
    "rollout.output": "the episodes are in the directory of --out",
    "engine.slots": "each session has a slot; set --places",
    "engine.dtype": "trainer and engine compute in float32",
    "engine.scripts": "a model answers",
    "pools.run": "each place runs a session; set --places",
    "pools.ready": "each place runs a session; set --places",
    "pools.prewarm": "a session is graded in a sandbox that comes up at its end",
}
"""Settings that have no effect on the loop, and why."""
_OF_OWN_TASKS = dict.fromkeys(
    ("tasks.limit", "tasks.instance_ids", "tasks.max_hackable"), "a family makes its own tasks, which --seed chooses"
)
"""Settings that have an effect on tasks of the user's only."""


@app.command()
def learn(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the recipe `learn`, e.g. harness=pi")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="The family of tasks, `trail` (default) or `repair`; not with tasks of your own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the tasks, of the start model, and of the order of tasks.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of GRPO.")] = 25,
    width: Annotated[
        int, typer.Option(min=32, help="Of the start model. A wider one learns at lower rates, and wants a GPU.")
    ] = Size().width,
    layers: Annotated[int, typer.Option(min=1, help="Of the start model.")] = Size().layers,
    places: Annotated[int, typer.Option(min=1, help="Sessions at once; see pools.init and pools.postrun, too.")] = 16,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Begin a step's sessions before the update of the step before.")
    ] = False,
    also: Annotated[
        list[str] | None, typer.Option(metavar="HARNESS", help="Train in this harness, too; may be given again.")
    ] = None,
    test_on: Annotated[
        list[str] | None, typer.Option(metavar="HARNESS", help="Test in this harness, too; may be given again.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's directory; default: outputs/learn/HARNESS-FAMILY-SEED.")
    ] = None,
) -> None:
    """Train a tiny model, made on the spot, with GRPO through a real harness, on a CPU.

    A run that was stopped goes on where it was. `engine.model_path=DIR tasks=jsonl tasks.path=FILE` trains a model of
    yours on tasks of yours.
    """
    config = load_config("learn", settings or [])
    if config.engine.name != "embedded":
        raise ConfigError(f"engine={config.engine.name}: the loop gives weights to engine=embedded; drop the setting")
    _check_sampling(config.sampling)
    own, more, tested = config.harness.name, also or [], test_on or []
    if twice := [name for name, count in Counter([own, *more, *tested]).items() if count > 1]:
        raise ConfigError(f"--also, --test-on: {', '.join(twice)}: named twice; name each harness once")
    configs = {own: config}
    configs |= {name: load_config("learn", [*(settings or []), f"harness={name}"]) for name in (*more, *tested)}
    chosen = _family(family, config)
    _check_effects(config, load_config("learn"), chosen)
    plan = Plan(
        family=chosen,
        seed=seed,
        steps=steps,
        places=places,
        size=_size(width, layers, config),
        overlap=overlap,
        only_tested=tuple(tested),
    )
    directory = out or Path("outputs/learn") / f"{'+'.join((own, *more))}-{plan.family or 'own'}-{seed}"
    try:
        lines = Run(directory, plan, configs, lambda line: console.print(Text(line), soft_wrap=True)).go()
    except (LogprobsDifferError, GradientError) as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt as error:
        errors.print(Text(f"stopped; the same command goes on with {directory}"), soft_wrap=True)
        raise typer.Exit(130) from error
    print_run(lines, console)
    console.print(Text(f"the curve is in {directory / 'curve.svg'}, every episode in {directory / 'episodes'}", "dim"))


def _size(width: int, layers: int, config: RunConfig) -> Size:
    """Return the size of the start model. Raises `ConfigError` where the directory of the user's model holds none, and
    where a size is given beside that model."""
    size, given = Size(width=width, layers=layers), config.engine.options.get("model_path")
    if given is not None and not (Path(given) / "config.json").is_file():
        raise ConfigError(f"engine.model_path={given}: is no directory of a model, which has config.json; name one")
    if given is not None and size != Size():
        raise ConfigError(f"--width, --layers: engine.model_path={given} has a size already; drop the options")
    return size


def _check_effects(config: RunConfig, recipe: RunConfig, family: str | None) -> None:
    """Raise `ConfigError` where a setting has no effect. Print a line where sessions on tasks of the user's have the
    limit of tokens of the recipe's small tasks."""
    given, unset = (each.model_dump(mode="json") for each in (config, recipe))
    for name, why in {**_UNUSED, **(_OF_OWN_TASKS if family else {})}.items():
        section, _, key = name.partition(".")
        if (value := given[section].get(key)) != unset[section].get(key):
            raise ConfigError(f"{name}={value}: has no effect here: {why}; drop the setting")
    limit = config.budget.max_sampled_tokens
    if family is None and limit is not None and limit == recipe.budget.max_sampled_tokens:
        line = (
            f"budget.max_sampled_tokens={limit}: the recipe's, for its own small tasks; a longer session has "
            "the reward 0; set it, budget.max_calls, rollout.timeout_seconds and harness.profile for your tasks "
            "(docs/learn.md)"
        )
        errors.print(Text(line, "yellow"), soft_wrap=True)


def _check_sampling(sampling: Sampling) -> None:
    """Raise `ConfigError` where a setting makes the distribution another one than the model's own, which is trained."""
    fields, neutral = sampling.model_dump(), Sampling().model_dump()
    if shaping := Sampling.shaping(fields):
        found = ", ".join(f"sampling.{name}={fields[name]}" for name in shaping)
        fix = ", ".join(f"sampling.{name}={neutral[name]}" for name in shaping)
        raise ConfigError(f"{found}: the loop trains the model's own distribution; drop the setting, or write {fix}")


def _family(given: str | None, config: RunConfig) -> str | None:
    """Return the family of tasks, or None for the config's own tasks. Raises `ConfigError` where both are given, or a
    model is missing."""
    if config.tasks.name == "bundled":
        family = given or "trail"
        if family not in FAMILIES:
            raise ConfigError(f"--family={family}: unknown; known: {', '.join(FAMILIES)}")
        return family
    if given is not None:
        raise ConfigError(f"--family={given}: tasks={config.tasks.name} names tasks of your own; drop one of them")
    if config.engine.options.get("model_path") is None:
        raise ConfigError("engine.model_path: is required for tasks of your own, a directory with a model")
    return None
