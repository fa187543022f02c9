"""Any program that the sandbox has: one of the image, one of the task's virtual environment, or a shell script.

`command` is a list of arguments, started as it is, or a string for `sh -c`. `{instruction}`, `{base_url}`, `{api_key}`
and `{model}` are filled in. In a string each becomes one quoted word, so it must not stand in quotation marks. The
instruction is also on standard input, which has no limit of length. The other values are also in the variables that the
official SDKs read (`harnesses/sdk.py`). Therefore most programs need no placeholder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from pydantic import Field, field_validator

from polar_gym.harnesses import Harness, Launch, LaunchContext
from polar_gym.harnesses.sdk import sdk_environment
from polar_gym.registry import Options
from polar_gym.schema import Environment

_PLACEHOLDER = re.compile(r"\{(instruction|base_url|api_key|model)\}")


class CommandOptions(Options):
    command: str | list[str]
    """An argv, or a line for `sh -c`. Placeholders: {instruction}, {base_url}, {api_key}, {model}."""
    environment: Environment = Field(default_factory=dict)
    """Variables in addition to those that the SDKs read. Placeholders are filled in without quoting."""

    @field_validator("command")
    @classmethod
    def _not_empty(cls, command: str | list[str]) -> str | list[str]:
        if not command:
            raise ValueError("expected a command line, or a list of arguments")
        return command


def launch(context: LaunchContext) -> Launch:
    options = CommandOptions.model_validate(context.spec.options)
    if isinstance(options.command, str):
        argv = ["sh", "-c", _fill(options.command, context, shlex.quote)]
    else:
        argv = [_fill(argument, context) for argument in options.command]
    own = {name: _fill(value, context) for name, value in options.environment.items()}
    return Launch(argv=argv, environment=sdk_environment(context) | own, stdin=context.instruction.encode())


def _fill(text: str, context: LaunchContext, quote: Callable[[str], str] = str) -> str:
    """Fill in the placeholders in one pass, so that a placeholder's name inside an instruction is left alone."""
    values = {
        "instruction": context.instruction,
        "base_url": context.base_url,
        "api_key": context.api_key,
        "model": context.spec.model_name,
    }
    return _PLACEHOLDER.sub(lambda match: quote(values[match[1]]), text)


HARNESS = Harness(launch=launch, acts_on_text=True, mcp_prefix="", Options=CommandOptions)
