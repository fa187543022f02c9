"""`polar-gym doctor`: what this machine can run, and what to install for the rest.

Every part is asked itself: a runtime by its own `check`, a harness by its place in the cache. A new plug-in therefore
appears here without a change. Nothing is installed and nothing is written.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import platform
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import orjson
import typer
from rich.table import Table
from rich.text import Text

from polar_gym.cli.sandbox_audit import audit_sandboxes
from polar_gym.config.checking import check_plugin
from polar_gym.console import console, table
from polar_gym.engines import EngineError
from polar_gym.engines.http import Http
from polar_gym.engines.openai_form import CHAT
from polar_gym.engines.vllm.generate import STAND_IN
from polar_gym.engines.vllm.own_grammar import CURE, TOOL, own_grammar
from polar_gym.errors import ConfigError, how_to_install
from polar_gym.harnesses import HARNESSES, install
from polar_gym.http.urls import is_http_url
from polar_gym.paths import cache_dir
from polar_gym.runtimes import RUNTIMES
from polar_gym.schema import PluginSpec

app = typer.Typer()

GIB = 1024**3
MEMORY_WANTED = 4 * GIB
"""Memory for the gateway, the embedded policy and a few harnesses at once."""
DISK_WANTED = 2 * GIB
"""Space for a few harnesses and workspace environments."""
ENGINE_TIMEOUT_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a machine has or lacks."""

    name: str
    found: str
    needed_for: str
    fix: str = ""
    """How to get the thing; empty: the machine has it."""
    kind: Literal["machine", "node", "runtime", "harness", "engine"] = "machine"

    @property
    def ok(self) -> bool:
        return not self.fix


@app.command()
def doctor(
    engine_url: Annotated[str | None, typer.Option(help="Also ask the vLLM at this URL.")] = None,
    sandbox: Annotated[
        bool, typer.Option("--sandbox", help="Attack real sandboxes instead: what do they hold?")
    ] = False,
    runtime: Annotated[list[str] | None, typer.Option(help="With --sandbox: a runtime; default: all usable.")] = None,
) -> None:
    """Say what this machine can run, and what to install for the rest.

    Exit code 1 where it can run no rollout, or where something is wrong with the engine at --engine-url.
    """
    if sandbox and engine_url is not None:
        raise ConfigError(f"--engine-url={engine_url!r}: has no effect with --sandbox; leave it out")
    if sandbox:
        audit_sandboxes(runtime or [])
        return
    if runtime:
        raise ConfigError(f"--runtime={runtime[0]} is for the probes of sandboxes: add --sandbox")
    if engine_url is not None and not is_http_url(engine_url):
        raise ConfigError(f"--engine-url={engine_url!r}: expected a URL, e.g. http://127.0.0.1:8000")
    checks = diagnose(engine_url=engine_url)
    console.print(render(checks))
    if not can_run(checks) or not all(check.ok for check in checks if check.kind == "engine"):
        raise typer.Exit(1)


def diagnose(cache: Path | None = None, engine_url: str | None = None) -> list[Check]:
    """Check this machine. `cache`: by default the one that rollouts use. `engine_url`: an engine to ask as well."""
    cache = cache or cache_dir()
    driver = Path("/proc/driver/nvidia/version").exists()
    return [
        Check("python", f"{platform.python_version()} at {sys.executable}", "everything; 3.11 or newer"),
        Check(
            "node and npm",
            _version("node"),
            needed_for=f"harnesses; {install.NODE_MAJOR} or newer",
            fix="\n".join(install.missing()),
            kind="node",
        ),
        *(_plugin("runtime", name, _runtime) for name in RUNTIMES.names()),
        *(_plugin("harness", name, partial(_harness, cache=cache)) for name in HARNESSES.names()),
        *([_engine(engine_url)] if engine_url else []),
        _program("git", "git", "workspaces and diffs"),
        _program("rg", "ripgrep", "searching; harnesses work without it, too"),
        _cores_and_memory(),
        _disk(cache),
        _torch(),
        Check(
            "GPU",
            "an NVIDIA driver" if driver else "none, and none is needed here",
            needed_for="vLLM, on the machine that runs it",
        ),
    ]


def can_run(checks: Sequence[Check]) -> bool:
    """Return whether this machine can run a rollout, which needs node and one runtime."""
    working = {check.kind for check in checks if check.ok}
    return {"node", "runtime"} <= working


def render(checks: Sequence[Check]) -> Table:
    """Return the checks as a table for a terminal, each missing part with its fix."""
    verdict = (
        "This machine can run: polar-gym rollout demo"
        if can_run(checks)
        else "This machine cannot run harnesses yet: it needs node and one runtime"
    )
    shown = table("polar-gym doctor", "", "part", "found", "needed for", justify="left")
    shown.caption, shown.caption_justify = verdict, "left"
    for check in checks:
        found = Text(check.found)
        if check.fix:
            found.append(f"\nfix: {check.fix}", style="yellow")
        state = Text("ok", "green") if check.ok else Text("lacks", "bold red")
        shown.add_row(state, Text(check.name), found, Text(check.needed_for, "dim"))
    return shown


def _runtime(name: str) -> Check:
    try:
        check_plugin("runtime", RUNTIMES, PluginSpec(name=name))
    except ConfigError as error:  # it must be accepted, as one that isolates nothing
        return Check(f"runtime {name}", "not usable", "sandboxes", str(error), "runtime")
    runtime = RUNTIMES.make(PluginSpec(name=name))
    lacking = runtime.check()
    found = "not usable" if lacking else "; ".join(["ready", *runtime.caveats()])
    return Check(f"runtime {name}", found, "sandboxes; one runtime is enough", "\n".join(lacking), "runtime")


def _harness(name: str, cache: Path) -> Check:
    harness = HARNESSES.get(name)
    found, fix = "needs no installation", ""
    if harness.package is not None:
        installed = install.place(harness, cache).exists()
        found = f"{harness.version}, {'installed' if installed else 'will be installed at its first use'}"
        fix = "needs node and npm" if harness.npm_package and not installed and install.missing() else ""
    return Check(f"harness {name}", found, f"harness={name}", fix, "harness")


def _plugin(kind: Literal["runtime", "harness"], name: str, check: Callable[[str], Check]) -> Check:
    try:
        return check(name)
    except ImportError as error:
        fix = "install what it imports, or remove the package that registers it"
        return Check(f"{kind} {name}", f"cannot be imported: {error}", f"{kind}={name}", fix, kind)


def _engine(url: str) -> Check:
    listing = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        with urllib.request.urlopen(listing, timeout=ENGINE_TIMEOUT_SECONDS) as answer:
            models = [str(model["id"]) for model in orjson.loads(answer.read())["data"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        found, fix = f"{type(error).__name__}: {error}", f"start vLLM, and try: curl {listing}"
    else:
        answered, fix = asyncio.run(_ask(url, models[0])) if models else ("no model", "")
        found = f"serves {', '.join(models)}; {answered}"
    return Check(f"engine {url}", found, "engine=vllm", fix, "engine")


async def _ask(url: str, model: str) -> tuple[str, str]:
    """Return whether the server takes tools and has a grammar of its own, and the cure where something is wrong."""
    http = Http("vLLM", url, None, patience_seconds=0)
    http.open()
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT_SECONDS):
            await http.post(CHAT, {"model": model, "messages": STAND_IN, "tools": [TOOL], "max_tokens": 1})
            found = await own_grammar(http, model)
    except (EngineError, TimeoutError) as error:
        if isinstance(error, EngineError) and error.status == 400:
            return f"refuses tools ({error})", "start vLLM with these flags, and the parser of its model"
        return f"whether it has a grammar of its own is not known ({error or 'no answer'})", ""
    finally:
        await http.close()
    if found == "none":
        return "no grammar of its own", ""
    return f"a grammar of its own for {'all calls' if found == 'all' else 'calls with tools'}", CURE


def _program(program: str, package: str, needed_for: str) -> Check:
    fix = "" if shutil.which(program) else f"apt-get install {package}"
    return Check(package, _version(program), needed_for, fix)


def _version(program: str) -> str:
    """Return the first line that `program --version` prints, or the reason why there is no line."""
    found = shutil.which(program)
    if found is None:
        return "not on PATH"
    done = subprocess.run([found, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return next(iter((done.stdout or done.stderr).splitlines()), f"{found} exits with {done.returncode}")


def _cores_and_memory() -> Check:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fix = "" if memory >= MEMORY_WANTED else f"{MEMORY_WANTED // GIB} GiB or more, or pools.run=1"
    return Check("cores, memory", f"{cores} cores, {memory / GIB:.1f} GiB", "sessions side by side", fix)


def _disk(cache: Path) -> Check:
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    fixes = []
    if not os.access(existing, os.W_OK):
        fixes.append(f"{existing} is not writable: set POLAR_GYM_CACHE to a directory that is")
    if free < DISK_WANTED:
        fixes.append(f"free {DISK_WANTED // GIB} GiB, or set POLAR_GYM_CACHE to a directory with more space")
    found = f"{cache}, {free / GIB:.1f} GiB free"
    return Check("cache", found, "harnesses and environments between runs", "\n".join(fixes))


def _torch() -> Check:
    try:
        found, fix = version("torch"), ""
    except PackageNotFoundError:
        found, fix = "not installed", f"optional: {how_to_install('torch')}"
    return Check("torch", found, "engine.policy=transformers", fix)
