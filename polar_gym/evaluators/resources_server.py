"""One episode of a NeMo Gym resources server: its seed, its tools, its verdict, and the cookies that name the episode.

The form is that of NeMo Gym's own agents (https://github.com/NVIDIA-NeMo/Gym, `responses_api_agents/simple_agent`).
Tool calls run one after the other, as they do there: a server may keep the state of an episode in the cookies.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import aiohttp

from polar_gym.evaluators import EvaluatorError, ToolAnswer
from polar_gym.http.failures import reason

TOOL_NAME = re.compile(r"(?!(verify|seed_session|aggregate_metrics|mcp)$)[A-Za-z0-9_-]{1,48}")
"""A tool's name is a path of the server, and part of the name that a harness shows to the model."""
MAX_TOOL_BYTES = 1024 * 1024
"""Of the arguments of a call, and of its answer."""
MAX_VERDICT_BYTES = 256 * 1024 * 1024
"""A verdict repeats the row and the conversation."""
KEPT_BYTES = 64 * 1024 * 1024
"""Of the arguments and answers of one session, which are kept for the verdict. After that, calls are refused."""
SAID_BYTES = 500


class AwayError(EvaluatorError):
    """No connection to the server can be made."""


class ResourcesServer:
    """One episode, between `open` and `close`."""

    def __init__(self, url: str, row: dict[str, Any], tools: list[dict[str, Any]], tool_seconds: float) -> None:
        """`tools`: as MCP describes tools. `tool_seconds`: time for one call of a tool."""
        self.row = row
        self.tools = tools
        self.away = ""
        """Why the server could not be reached during a tool call, if so."""
        self._said: list[tuple[str, Any, str]] = []
        """The tool, the arguments and the answer of each call."""
        self._kept = 0
        self._url = url.rstrip("/")
        self._tool_seconds = tool_seconds
        self._turn = asyncio.Lock()
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Begin the episode. Raises `EvaluatorError`."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),  # a kept connection may be closed when it is used again
            cookie_jar=aiohttp.CookieJar(unsafe=True, quote_cookie=False),  # unsafe: also for a host that is a number
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        status, answer = await self._post("/seed_session", self.row, MAX_VERDICT_BYTES)
        if status != 200:
            raise EvaluatorError(self.refused("/seed_session", status, answer))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Return the answer of a tool. Nothing is raised: the agent is told what went wrong."""
        size = len(json.dumps(arguments))
        if size > MAX_TOOL_BYTES:
            return ToolAnswer(f"{name}: the arguments have more than {MAX_TOOL_BYTES} bytes", failed=True)
        async with self._turn:
            if self._kept > KEPT_BYTES:
                return ToolAnswer(f"{name}: the tools of this session have had {KEPT_BYTES} bytes", failed=True)
            answer = await self._ask(name, arguments)
            self._kept += size + len(answer.text)
            self._said.append((name, arguments, answer.text))
        return answer

    async def _ask(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        try:
            async with asyncio.timeout(self._tool_seconds):
                status, answer = await self._post(f"/{name}", arguments, MAX_TOOL_BYTES)
        except AwayError as error:
            self.away = str(error)
            return ToolAnswer("the tool's server cannot be reached", failed=True)
        except EvaluatorError as error:
            return ToolAnswer(f"{name}: {error}", failed=True)
        except TimeoutError:
            return ToolAnswer(f"{name}: no answer within {self._tool_seconds:g} seconds", failed=True)
        return ToolAnswer(answer.decode(errors="replace"), failed=status != 200)

    def said(self, asked: Sequence[tuple[str, str]]) -> list[str | None]:
        """Return what the tools said to these calls, each a tool and its arguments as JSON; None: it never ran.

        A call that ran with other arguments than those asked for (some harnesses mend them) is found by its tool.
        """
        left = list(self._said)
        words = [_taken(left, name, arguments) for name, arguments in asked]
        return [_taken(left, name) if found is None else found for (name, _), found in zip(asked, words, strict=True)]

    async def verify(self, response: dict[str, Any]) -> tuple[int, bytes]:
        """Return status and body of the verdict. Raises `AwayError`, or `EvaluatorError` for a body without end."""
        return await self._post("/verify", {**self.row, "response": response}, MAX_VERDICT_BYTES)

    def refused(self, path: str, status: int, answer: bytes) -> str:
        said = answer[:SAID_BYTES].decode(errors="replace")
        return f"{self._url}{path} answered {status}: {said or 'nothing'}"

    async def _post(self, path: str, body: dict[str, Any], limit: int) -> tuple[int, bytes]:
        assert self._http is not None, "call open() first"
        answer = bytearray()
        try:
            async with self._http.post(self._url + path, json=body, allow_redirects=False) as response:
                async for chunk in response.content.iter_any():
                    answer += chunk
                    if len(answer) > limit:
                        raise EvaluatorError(f"{self._url}{path} answered with more than {limit} bytes")
                return response.status, bytes(answer)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            why = f"{self._url}{path} cannot be reached ({reason(error)}); is the resources server running there?"
            raise AwayError(why) from error
        except aiohttp.ClientError as error:  # the agent's words may have caused it
            raise EvaluatorError(f"{self._url}{path}: {reason(error)}") from error


def _taken(left: list[tuple[str, Any, str]], name: str, arguments: str | None = None) -> str | None:
    """Remove the first call of a tool, with these arguments where they are given, and return its answer."""
    try:
        asked = None if arguments is None else json.loads(arguments)
    except ValueError:
        return None
    # Compared as values: a harness in JavaScript writes 9.0 as 9.
    same = (at for at, (tool, given, _) in enumerate(left) if tool == name and (arguments is None or given == asked))
    place = next(same, None)
    return None if place is None else left.pop(place)[2]
