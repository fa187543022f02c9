"""Checks a composed config: the keys of a run, and the options of each plug-in that it names."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from polar_gym import registry, spans, tracking
from polar_gym.config.files import ROOMS, group_choices
from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError, explain, validated
from polar_gym.harnesses import HARNESSES
from polar_gym.schema import EvaluatorSpec, HarnessSpec, PluginSpec


def check_config(values: Any) -> RunConfig:
    """Return the checked form of a composed config. Raises `ConfigError`, also for wrong options of a plug-in."""
    config = validated(RunConfig, values)
    for key, found in ROOMS.items():
        if key != "evaluator" or not _completed_by_tasks(config.evaluator):
            check_plugin(key, found, getattr(config, key))
    if config.scoring.reference is not None:
        check_plugin("scoring.reference", ROOMS["engine"], config.scoring.reference)
    if config.proxy.frozen is not None:
        check_plugin("proxy.frozen.engine", ROOMS["engine"], config.proxy.frozen.engine)
    _check_today(config.harness)
    tracking.check_installed(config.rollout.metrics)
    spans.check_installed(config.rollout.spans)
    return config


def _completed_by_tasks(spec: EvaluatorSpec) -> bool:
    """Return whether options come from each task (`make_request`, which checks them)."""
    return spec.name in ("swe", "composite", "harbor") or (
        spec.name == "test_on_output" and "command" not in spec.options
    )


def _check_today(spec: HarnessSpec) -> None:
    """Raise `ConfigError` for a date that a shipped harness cannot be told.

    A harness of third parties is not refused: its config may inherit the date of the default harness.
    """
    untold = spec.name in group_choices()["harness"] and HARNESSES.get(spec.name).told_today_by is None
    if spec.today is not None and untold:
        raise ConfigError(f"harness.today={spec.today}: {spec.name} cannot be told a date; leave it out")


def check_tools(harness: HarnessSpec, evaluator: EvaluatorSpec, options: Any) -> None:
    """Raise `ConfigError` for a harness that cannot have the tools of an evaluator, which has these checked options."""
    tools = getattr(options, "tools", ())
    if tools and HARNESSES.get(harness.name).mcp_prefix is None:
        taking = [name for name in HARNESSES.names() if HARNESSES.get(name).mcp_prefix is not None]
        raise ConfigError(
            f"agent.name={harness.name!r}: it takes no MCP server, and so cannot have the {len(tools)} tools that "
            f"evaluator.name={evaluator.name!r} offers; use {', '.join(taking)}"
        )


def check_plugin(key: str, found: registry.Registry[Any], spec: PluginSpec) -> Any:
    """Return the checked options of a plug-in.

    Raises `ConfigError` where there is no such plug-in, or where it does not take these options.
    """
    try:
        return found.options(spec)
    except registry.UnknownNameError as error:
        raise ConfigError(f"{key}.name: {error}") from error
    except ValidationError as error:
        raise ConfigError(explain(error, found.accepted(spec.name), key, also=type(spec).model_fields)) from error
