"""`polar-gym tasks from-git`: search the history of a repository for tasks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.status import Status
from rich.text import Text

from polar_gym.cli.grading import grading_config
from polar_gym.config.run_config import RunConfig
from polar_gym.console import console, errors, table
from polar_gym.curation.bench import Bench
from polar_gym.curation.statement import Writer, read_issues
from polar_gym.errors import ConfigError, how_to_install
from polar_gym.http.keys import read_key
from polar_gym.http.urls import is_http_url
from polar_gym.paths import cache_dir, check_writable

if TYPE_CHECKING:
    from polar_gym.curation.from_git import Commit, History


def from_git(
    repository: Annotated[Path, typer.Argument(help="A git repository, bare or with a work tree.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Where the tests run, e.g. runtime=docker.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The JSONL file to add tasks to.")] = Path("tasks/git.jsonl"),
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many new tasks.")] = None,
    since: Annotated[datetime | None, typer.Option(help="Leave out commits before this day.")] = None,
    head: Annotated[str, typer.Option(help="The newest commit: a branch, a tag or an id.")] = "HEAD",
    name: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Default: from the remote's URL.")] = None,
    require: Annotated[
        list[str] | None, typer.Option(help="A package that the tests need and that no file of the repository names.")
    ] = None,
    issues: Annotated[
        Path | None, typer.Option(help="JSONL with number, title and body: the issues that messages name.")
    ] = None,
    writer: Annotated[
        str | None, typer.Option(metavar="MODEL@URL", help="A model that writes instructions; URL ends in /v1.")
    ] = None,
    writer_key_env: Annotated[
        str | None, typer.Option(help="The variable with the key of the writer's server.")
    ] = None,
) -> None:
    """Make tasks from the commits of a repository that change source files and tests: the newest first.

    A task is proven before it is written. A search that was stopped goes on where it was.
    """
    try:
        from polar_gym.curation.from_git import commits, open_history
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing; install it with: {how_to_install('swe')}") from error

    config = grading_config(settings)
    check_writable("--out", out)
    history = open_history(
        repository,
        name,
        head=head,
        since=since and since.astimezone(),
        extra_requirements=require or (),
        issues=read_issues(issues) if issues else {},
        writer=_writer(writer, writer_key_env),
    )
    try:
        asyncio.run(_search(history, list(commits(history)), config, out, limit))
    except KeyboardInterrupt as error:
        errors.print(Text(f"stopped; the same command goes on, from the journal beside {out}"), soft_wrap=True)
        raise typer.Exit(130) from error


def _writer(text: str | None, key_env: str | None) -> Writer | None:
    if text is None:
        return None
    model, _, url = text.rpartition("@")
    if not model or not is_http_url(url):
        raise ConfigError(f"--writer={text}: expected MODEL@URL, e.g. my-model@http://127.0.0.1:8000/v1")
    key = read_key(key_env) if key_env else None
    if key_env and key is None:
        raise ConfigError(f"--writer-key-env={key_env}: there is no such variable; set it")
    return Writer(url=url, model=model, key=key)


async def _search(history: History, every: Sequence[Commit], config: RunConfig, out: Path, limit: int | None) -> None:
    """Try the candidates that were not tried before, and print a line for each, and a table of all."""
    from polar_gym.curation.from_git import tried, try_commit

    candidates = [commit for commit in every if not commit.lacks]
    done = tried(out, history.options)
    new = [commit for commit in candidates if commit.sha not in done]
    errors.print(f"{len(every)} commits, {len(candidates)} candidates, {len(new)} not tried yet", style="dim")
    made = 0
    try:
        async with Bench(config.runtime, cache_dir(), config.evaluator) as bench:
            for number, commit in enumerate(new, 1):
                if made == limit:
                    break
                head = f"{number}/{len(new)} {commit.sha[:12]}: "
                with errors.status(head) as status:
                    say = partial(_say, status, head)
                    result = await try_commit(history, commit, bench, out, say)
                done[commit.sha] = result
                made += bool(result.task)
                why = result.why.partition("\n")[0][:200]
                console.print(Text(head + (result.task or f"{result.fell}: {why}")), soft_wrap=True)
    finally:
        fell = Counter(f"fell: {each.fell}" for each in done.values() if not each.task)
        lacking = Counter(f"no candidate: {commit.lacks}" for commit in every if commit.lacks)
        tasks = sum(bool(each.task) for each in done.values())
        counts = table(f"{history.name}: {tasks} tasks in {out}", "", "commits")
        left = sum(commit.sha not in done for commit in candidates)
        for reason, count in {**lacking, **fell, "not tried": left, "tasks": tasks}.items():
            counts.add_row(reason, str(count))
        console.print(counts)
    if not candidates:
        raise ConfigError(f"{history.name}: of {len(every)} commits none changes a source file and a test in Python")


def _say(status: Status, head: str, text: str) -> None:
    status.update(Text(head + text))
