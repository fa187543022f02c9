"""`polar-gym eval`: pass@k of episodes, from files or from a recipe that is run now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar_gym.console import console, errors, table
from polar_gym.episodes.pass_at_k import Tally, check_one_agent, independent, pass_at_k, tally, usual_ks
from polar_gym.episodes.reading import began_again, read_all
from polar_gym.errors import ConfigError
from polar_gym.schema import Episode, Fidelity, Trajectory

app = typer.Typer()


@app.command("eval")
def evaluate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | RECIPE KEY=VALUE",
            help="Files of episodes, as `polar-gym rollout` writes them, or what to roll out.",
        ),
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="Of pass@k; again for more. Else 1, 2, 4, ...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; progress goes to stderr.")] = False,
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", help="A directory with recipes and groups of your own.")
    ] = None,
) -> None:
    """Report pass@k with 95 % confidence intervals, by task and by repository.

    An episode without a reward (the machinery failed) is counted as masked and is in no estimate. Branches of other
    episodes are left out, and sessions that a resumed run began again. All are of one harness, in one profile and with
    the same options, and of one model, sampled in one way.

    Exit code 1 when no episode has a reward.
    """
    found = _episodes(arguments or [], config_dir, errors if as_json else console)
    episodes = [episode for episode in found if not began_again(episode)]
    samples = independent(episodes)
    check_one_agent(samples)
    tallies = tally(samples)
    report = _report(tallies, list(dict.fromkeys(k or usual_ks(tallies))), branches=len(episodes) - len(samples))
    report["begun_again_left_out"] = len(found) - len(episodes)
    if as_json:
        typer.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(tallies, report)
    if not any(each.scored for each in tallies):
        raise typer.Exit(1)


def _episodes(arguments: Sequence[str], config_dir: Path | None, progress: Console) -> list[Episode]:
    """Return the episodes of files, or of a recipe that is run now. Raises `ConfigError` for a mix of both, and for an
    episode that occurs twice."""
    if arguments and all(_is_file(argument, config_dir) for argument in arguments):
        if config_dir is not None:
            raise ConfigError(f"--config-dir={str(config_dir)!r}: has no effect on files of episodes; leave it out")
        untold = {"trajectory": Trajectory(builder="", traces=[], fidelity=Fidelity())}  # the rewards alone count
        return [episode.model_copy(update=untold) for episode in read_all(map(Path, arguments))]
    if not arguments:
        raise ConfigError("give files of episodes, e.g. outputs/demo.jsonl, or a recipe that is rolled out, e.g. demo")
    if any(_is_file(argument, config_dir) for argument in arguments):
        raise ConfigError(f"{' '.join(arguments)}: give files of episodes, or a recipe and settings, not both")
    from polar_gym.cli.rollout import episodes_of
    from polar_gym.config.composition import split_recipe
    from polar_gym.config.loading import load_config

    return episodes_of(load_config(*split_recipe(arguments), config_dir=config_dir), progress)


def _is_file(argument: str, config_dir: Path | None) -> bool:
    """Return whether an argument names a file of episodes. A recipe's name does not, where a file has it too.

    Raises `ConfigError`.
    """
    if argument.endswith(".jsonl") and "=" not in argument:
        return True
    from polar_gym.config.files import recipe_names

    return Path(argument).is_file() and argument not in recipe_names(config_dir)


def _report(tallies: Sequence[Tally], ks: Sequence[int], *, branches: int) -> dict[str, Any]:
    by_repo: defaultdict[str, list[Tally]] = defaultdict(list)
    for each in tallies:
        by_repo[each.repo].append(each)
    return {
        "tasks": len(tallies),
        "episodes": sum(each.scored + each.masked for each in tallies),
        "scored": sum(each.scored for each in tallies),
        "masked": sum(each.masked for each in tallies),
        "truncated": sum(each.truncated for each in tallies),
        "branches_left_out": branches,
        "pass_at_k": _estimates(tallies, ks),
        "by_repo": {
            repo: {
                "tasks": len(members),
                "scored": sum(each.scored for each in members),
                "masked": sum(each.masked for each in members),
                "pass_at_k": _estimates(members, ks),
            }
            for repo, members in by_repo.items()
        },
        "by_task": [asdict(each) for each in tallies],
    }


def _estimates(tallies: Sequence[Tally], ks: Sequence[int]) -> list[dict[str, Any]]:
    return [asdict(pass_at_k(tallies, k)) for k in ks]


def _print(tallies: Sequence[Tally], report: dict[str, Any]) -> None:
    console.print(_task_table(tallies))
    if len(report["by_repo"]) > 1:
        console.print(_repo_table(report["by_repo"]))
    for fields in report["pass_at_k"]:
        short = f"; {fields['left_out']} tasks have fewer samples" if fields["left_out"] else ""
        console.print(f"pass{_interval(fields)}, over {fields['tasks']} tasks{short}", soft_wrap=True)
    console.print(
        f"{report['scored']} of {report['episodes']} episodes scored, {report['truncated']} of them ended by a budget; "
        f"{report['masked']} masked",
        soft_wrap=True,
    )
    if again := report["begun_again_left_out"]:
        console.print(f"{again} sessions left out: a resumed run began their samples again", soft_wrap=True)
    if branches := report["branches_left_out"]:
        console.print(f"{branches} branches of other episodes left out: no independent samples", soft_wrap=True)


def _task_table(tallies: Sequence[Tally]) -> Table:
    tasks = table("tasks", "", "passed", "scored", "masked", "truncated", "mean reward")
    for each in tallies:
        mean = "" if each.mean_reward is None else f"{each.mean_reward:.3f}"
        numbers = (each.passed, each.scored, each.masked, each.truncated)
        tasks.add_row(Text(each.task_id), *map(str, numbers), mean)
    return tasks


def _repo_table(by_repo: dict[str, dict[str, Any]]) -> Table:
    repositories = table("repositories", "", "tasks", "scored", "masked", "pass@k")
    for repo, entry in by_repo.items():
        said = "\n".join(map(_interval, entry["pass_at_k"]))
        figures = (str(entry[name]) for name in ("tasks", "scored", "masked"))
        repositories.add_row(Text(repo or "(none)"), *figures, said)
    return repositories


def _interval(fields: Mapping[str, Any]) -> str:
    if fields["value"] is None:
        return f"@{fields['k']} unknown"
    return f"@{fields['k']} {fields['value']:.3f} (95 %: {fields['low']:.3f} to {fields['high']:.3f})"
