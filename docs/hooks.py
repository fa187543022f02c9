"""Gives mkdocs the pages that are not in docs/: those of the checkout, and references that are made of the code.

A link in a page works in the checkout and on the site: `../recipes/README.md` becomes `recipes.md`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from omegaconf import MISSING, OmegaConf

from polar_gym.config.help import Key, Section, section_of, sections
from polar_gym.gateway.node.settings import GatewaySettings
from polar_gym.http import node_routes, server_routes
from polar_gym.http.route import Route
from polar_gym.service.settings import ServeSettings

CHECKOUT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "recipes/README.md": "recipes.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Page of the checkout -> its place on the site."""
LINK = re.compile(r"(?P<words>!?\[[^\]]*\])\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
PYTHON = (
    "# Python API\n\nThe public names of `polar_gym`, the forms of trainers, and what plug-ins are made of.\n\n"
    + "\n".join(
        f"::: {name}\n"
        for name in (
            "polar_gym.schema.TaskRequest",
            "polar_gym.schema.Episode",
            "polar_gym.schema.Trace",
            "polar_gym.client.RolloutClient",
            "polar_gym.training.make_batch",
            "polar_gym.training.padded",
            "polar_gym.training.trl",
            "polar_gym.training.nemo_rl",
            "polar_gym.training.verl",
            "polar_gym.training.prime_rl",
            "polar_gym.harnesses.Harness",
            "polar_gym.harnesses.LaunchContext",
            "polar_gym.harnesses.Launch",
            "polar_gym.evaluators.EvaluationContext",
            "polar_gym.schema.EvaluationResult",
            "polar_gym.config.loading.load_config",
            "polar_gym.errors.ConfigError",
        )
    )
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    pages = {place: (CHECKOUT / page).read_text(encoding="utf-8") for page, place in ELSEWHERE.items()}
    pages |= {"reference/config.md": _config(), "reference/http.md": _http(), "reference/python.md": PYTHON}
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with its links to files of the checkout changed to links on the site."""
    places = {place: page for page, place in ELSEWHERE.items()}
    here = places.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_site(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), found["target"]))
        place = ELSEWHERE.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if place is None:  # a file that is not on the site: only the link's words stay
            return found["words"].strip("![]")
        beside = posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")
        return f"{found['words']}({beside}{found['anchor'] or ''})"

    return LINK.sub(on_site, markdown)


def _config() -> str:
    """Return the page of all keys: those of a rollout, of a node and of the rollout server."""
    made = [*sections(), section_of("gateway", GatewaySettings, {}), section_of("serve", ServeSettings, {})]
    body = "\n".join(line for section in made for line in _section(section))
    return (
        f"# Configuration\n\nEvery key, its default and its type, read from the code that checks a config.\n\n{body}\n"
    )


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.name}\n\n{_safe(section.description)}\n"
    yield from (f"- `{section.name}={name}`: {_safe(text)}" for name, text in section.choices.items())
    yield ""
    yield from map(_line, section.keys)
    yield ""


def _line(key: Key) -> str:
    default = "is required" if key.default == MISSING else f"= `{_value(key.default)}`"
    return f"- `{key.name}` {default} ({_safe(key.type)})<br>{_safe(key.description)}"


def _value(default: Any) -> str:
    """Return a default as a person types it."""
    return OmegaConf.to_yaml(OmegaConf.create({"value": default})).removeprefix("value:").removesuffix("\n").strip()


def _http() -> str:
    """Return the page of all routes: those of the rollout server and of a node."""
    lines = ["# HTTP API\n\nThe rollout server documents its routes at `/openapi.json`, too.\n"]
    for title, module in (("The rollout server", server_routes), ("A node", node_routes)):
        lines.append(f"## {title}\n\n| route | | takes | gives | key |\n|---|---|---|---|---|")
        for route in (value for value in vars(module).values() if isinstance(value, Route)):
            named = [f"`{record.__name__}`" if record else "" for record in (route.takes, route.gives)]
            keys = ", ".join(route.keys)
            lines.append(f"| `{route.method} {route.path}` | {_safe(route.summary)} | {' | '.join(named)} | {keys} |")
        lines.append("")
    return "\n".join(lines)


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
