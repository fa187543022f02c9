"""`polar-gym submit | status | cancel | watch`: the tasks of a rollout service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.text import Text

from polar_gym.client import DEFAULT_URL, RolloutClient, RolloutServiceError, UnreachableError
from polar_gym.client.watch import follow, node_table, sample_table, task_table
from polar_gym.console import console, errors
from polar_gym.durable import read_records
from polar_gym.errors import ConfigError, UnavailableError
from polar_gym.paths import check_writable
from polar_gym.schema import TaskRequest

if TYPE_CHECKING:
    from polar_gym.config.run_config import RunConfig

app = typer.Typer()

T = TypeVar("T")

_AT_THE_NODES = "set it where the nodes start (`polar-gym serve` or `polar-gym gateway`)"
_IDLE = {
    "engine": _AT_THE_NODES,
    "pools": _AT_THE_NODES,
    "proxy": _AT_THE_NODES,
    "scoring": _AT_THE_NODES,
    "rollout.spans": _AT_THE_NODES,
    "rollout.output": "give --output FILE",
    "rollout.metrics": "leave it out",
    "rollout.state": "leave it out",
    "hydra": "leave it out",
}
"""Keys of settings that no request carries -> advice for the error."""

Server = Annotated[
    str, typer.Option(envvar="POLAR_GYM_SERVER", help="The rollout server; its key is in POLAR_GYM_SERVICE_KEY.")
]
Wait = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long a server that does not answer may take to start.")
]
KEEP_TRYING_SECONDS = 300.0
"""How long a command waits for a server that answered before: it may be restarted meanwhile."""
Output = Annotated[
    Path | None,
    typer.Option(
        help="Write episodes here as they arrive, one a line, and wait for all; those of cancelled samples come last."
    ),
]


@app.command()
def submit(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | RECIPE KEY=VALUE",
            help="A .jsonl file of TaskRequests (-: stdin), or a rollout: a recipe's name and settings.",
        ),
    ] = None,
    server: Server = DEFAULT_URL,
    wait: Wait = 0,
    prefix: Annotated[str, typer.Option(help="Put before every task id, e.g. run7-: ids are used once.")] = "",
    output: Output = None,
) -> None:
    """Submit tasks and print their ids. The same task twice is one task."""
    if output is not None:
        check_writable("--output", output)
    requests = [request.model_copy(update={"task_id": prefix + request.task_id}) for request in _requests(arguments)]

    async def work(client: RolloutClient) -> None:
        for request in requests:
            await client.submit(request)
            if output is None:
                typer.echo(request.task_id)

    _run(server, wait, work)
    if output is not None:
        _follow(server, wait, [request.task_id for request in requests], output)


@app.command()
def status(
    task_id: Annotated[str | None, typer.Argument(help="One task; none: the newest tasks, and the nodes.")] = None,
    server: Server = DEFAULT_URL,
    wait: Wait = 0,
    limit: Annotated[int | None, typer.Option(min=1, max=500, help="How many tasks; default: 20.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The server's own answer.")] = False,
) -> None:
    """Show the progress of tasks, and the sessions of the nodes."""
    if task_id is not None and limit is not None:
        raise ConfigError(f"--limit={limit}: has no effect on one task; leave it out")

    async def work(client: RolloutClient) -> list[Any]:
        if task_id is not None:
            return [await client.task(task_id)]
        return [await client.tasks(limit or 20), await client.nodes()]

    found = _run(server, wait, work)
    if json:
        typer.echo(found[0].to_json().decode())
    elif task_id is not None:
        console.print(task_table([found[0]]), sample_table(found[0]))
    else:
        console.print(task_table(found[0].tasks), node_table(found[1]))


@app.command()
def cancel(
    task_ids: Annotated[list[str], typer.Argument(metavar="TASK_ID", help="Tasks, as `submit` named them.")],
    server: Server = DEFAULT_URL,
    wait: Wait = 0,
) -> None:
    """Cancel tasks: stop running sessions, and keep their captured calls, excluded from training."""

    async def work(client: RolloutClient) -> None:
        for task_id in task_ids:
            task = await client.task(task_id)
            if task.finished_at is not None:
                typer.echo(f"{task_id} had ended before: {task.status}")
            else:
                typer.echo(f"{task_id} {(await client.cancel(task_id)).status}")

    _run(server, wait, work)


@app.command()
def watch(
    task_ids: Annotated[list[str], typer.Argument(metavar="TASK_ID", help="Tasks, as `submit` named them.")],
    server: Server = DEFAULT_URL,
    wait: Wait = 0,
    output: Output = None,
) -> None:
    """Watch tasks until they have ended. Exit code 1: some are not completed."""
    if output is not None:
        check_writable("--output", output)
    _follow(server, wait, task_ids, output)


def _follow(server: str, wait: float, task_ids: list[str], output: Path | None) -> None:
    ended = _run(server, wait, lambda client: follow(client, task_ids, output, console))
    console.print(task_table(ended))
    if any(task.status != "COMPLETED" or task.failures.keys() - {"early_stop"} for task in ended):
        raise typer.Exit(1)


def _requests(arguments: list[str] | None) -> list[TaskRequest]:
    from polar_gym.gateway.node.assemble import load_tasks, make_request

    first = arguments[0] if arguments else ""
    if first == "-" or first.endswith(".jsonl"):
        if others := (arguments or [])[1:]:
            raise ConfigError(f"{others[0]!r}: the requests of a file are submitted as they are")
        return list(read_records(Path(first), TaskRequest, "request", "a task request"))
    config = _rollout(arguments or [])
    return [make_request(config, task) for task in load_tasks(config)]


def _rollout(arguments: list[str]) -> RunConfig:
    """Return the config of a rollout whose engine and proxy are the nodes'. Print what the nodes must be set to.

    Raises `ConfigError`, also for a setting that has no effect.
    """
    from polar_gym.config.composition import split_recipe
    from polar_gym.config.loading import load_config

    recipe, settings = split_recipe(arguments)
    effective = [setting for setting in settings if _has_effect(setting)]
    config = load_config(recipe, effective, {"engine": "embedded"})  # it requires no settings, and is not made
    for name, value in config.proxy.model_dump(mode="json", exclude_defaults=True).items():
        _complain(f"proxy.{name}={value} of the recipe {recipe} has no effect on submitted tasks; {_AT_THE_NODES}")
    return config


def _has_effect(setting: str) -> bool:
    """Return whether requests carry a setting. Raises `ConfigError` where they do not.

    `engine.url` is a warning only: `polar-gym rollout` asks for it in many recipes, and users give it here, too.
    """
    from polar_gym.config.composition import overridden_key, why_idle

    why = why_idle(setting, _IDLE, "on submitted tasks")
    if why is None:
        return True
    if overridden_key(setting) != "engine.url":
        raise ConfigError(why)
    _complain(why)
    return False


def _run(server: str, wait: float, work: Callable[[RolloutClient], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `work` with a client. Raises `ConfigError` where the service refuses or does not answer."""
    try:
        connection = RolloutClient(server, keep_trying_seconds=KEEP_TRYING_SECONDS, wait_seconds=wait, notice=_complain)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error

    async def connected() -> T:
        async with connection as client:
            return await work(client)

    try:
        return asyncio.run(connected())
    except UnreachableError as error:
        raise UnavailableError(str(error)) from error
    except RolloutServiceError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        _complain("interrupted; submitted tasks go on: `polar-gym watch` shows them, `polar-gym cancel` ends them")
        raise typer.Exit(130) from None


def _complain(line: str) -> None:
    errors.print(Text(line, "yellow"), soft_wrap=True)
