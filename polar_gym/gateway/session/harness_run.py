"""One run of a harness in its sandbox, from the launch until the harness or a budget ends, and who is to blame."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from polar_gym.background_loop import cancel_all
from polar_gym.engines import UNREACHABLE
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.proxy.mcp import MCP_PATH
from polar_gym.gateway.proxy.proxy import Proxy
from polar_gym.harnesses import Launch, LaunchContext
from polar_gym.harnesses.install import InstallError
from polar_gym.harnesses.today import told_today
from polar_gym.runtimes import HOME, TOOLCHAIN, Command, ExecResult, Sandbox
from polar_gym.runtimes.agent import PATH
from polar_gym.runtimes.files import write_files
from polar_gym.schema import Failure, ModelCall, Session, Status, TaskRequest

PAUSES_SECONDS = 24 * 3600.0
"""How long generation may be paused in total while one harness runs."""

ENDING_SECONDS = 60.0
"""How long a runtime may take to end a command. After that the command is cancelled, and its output is lost."""

SILENCE_SECONDS = 30.0
"""How long a live engine may send nothing of an answer that it has begun."""

SIGNALLED = 128
"""An exit code above it says that a signal ended the process."""

log = logging.getLogger(__name__)

NO_OUTPUT = ExecResult(exit_code=None, stdout=b"", stderr=b"")


class LaunchError(Exception):
    """A harness's description does not say how to start the harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRun:
    """A sandbox that is up, and the session whose harness runs in it."""

    sandbox: Sandbox
    request: TaskRequest
    session: Session
    capture: SessionCapture
    proxy: Proxy

    def launch(self, executable: Sequence[str], context_length: int) -> Launch:
        """Return how to start the harness: `executable` begins its argv, `context_length` is the engine's.

        Raises `LaunchError`.
        """
        context = LaunchContext(
            spec=self.request.agent,
            base_url=self.sandbox.base_url,
            api_key=self.capture.key,
            context_length=context_length,
            instruction=self.request.instruction,
            home=HOME,
            mcp_url=f"{self.sandbox.base_url}{MCP_PATH}" if self.capture.offers_tools else None,
            workdir=self.request.runtime.workspace.path,
            executable=executable,
        )
        harness = self.capture.harness
        try:
            launch = told_today(harness, harness.launch(context), context)
        except InstallError as error:
            raise LaunchError(str(error)) from error
        except Exception as error:
            log.exception("session %s: harness=%s", self.session.session_id, self.request.agent.name)
            raise LaunchError(f"launch of harness={self.request.agent.name} raised {error!r}") from error
        for path in launch.files:
            if not path.startswith("/"):
                raise LaunchError(
                    f"Launch.files of harness={self.request.agent.name}: {path!r} is a relative path; name an absolute "
                    'one in the sandbox, such as f"{context.home}/..."'
                )
        return launch

    async def to_its_end(self, launch: Launch) -> ExecResult:
        """Run the harness until it or a budget ends, and set `exit_code` and `truncated_by` of the session."""
        if launch.files:
            await write_files(self.sandbox, launch.files)
        path = await self._path()
        end = asyncio.Event()
        command = Command(
            argv=launch.argv,
            environment={"PATH": f"{path}:{TOOLCHAIN}/bin", **launch.environment},
            stdin=launch.stdin,
            timeout_seconds=self.request.timeout_seconds + PAUSES_SECONDS,
            end=end,
            untrusted=True,
        )
        output = await self._run(command, end)
        self.session.exit_code = output.exit_code
        if self.session.truncated_by is None and self.capture.cut_by_budget:
            self.session.truncated_by = "tokens"
        return output

    async def _path(self) -> str:
        """Return the directories of programs as a command in the sandbox finds them: an image may name its own."""
        said = await self.sandbox.exec(Command(argv=["/bin/sh", "-c", 'printf %s "$PATH"']))
        return said.stdout.decode(errors="replace") or PATH

    async def _run(self, command: Command, end: asyncio.Event) -> ExecResult:
        """Run the command, and set `end` when a budget ends.

        The time while generation is paused, or recorded calls are answered, does not count as the agent's.
        """
        running = asyncio.create_task(self.sandbox.exec(command))
        time_is_up = asyncio.create_task(self._time())
        exhausted = self.capture.exhausted
        try:
            await asyncio.wait({running, time_is_up, exhausted}, return_when=asyncio.FIRST_COMPLETED)
            if exhausted.done():
                self.session.truncated_by = exhausted.result()
            elif not running.done():
                self.session.truncated_by = "time"
                self.capture.time_is_up = True
            end.set()
            await asyncio.wait({running}, timeout=ENDING_SECONDS)
        finally:
            time_is_up.cancel()
            if not running.done():
                await cancel_all([running])
        return NO_OUTPUT if running.cancelled() else running.result()

    async def _time(self) -> None:
        """Return when the agent's time is up. A replay may take as long; a resumed agent has what was left."""
        limit, recording, gate = self.request.timeout_seconds, self.capture.recording, self.proxy.generation
        used = 0.0
        if recording is not None:
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self.capture.caught_up.wait()
            self.session.timing.replay = time.monotonic() - began
            used = recording.seconds
        zero = gate.seconds - used
        self.capture.clock = lambda: gate.seconds - zero
        await gate.sleep(max(0.0, limit - used))

    async def blame(self, output: ExecResult) -> Failure | None:
        """Return why the run cannot be scored; None: what the agent left is graded.

        Exit codes lie in both directions, so the calls of the run decide. Once the agent has acted, it is to blame for
        every end: it can kill the harness, write to the harness's own files, and send requests that an engine refuses.
        The one exception is an engine that failed by itself (`_engine_failed`), or fell silent: the time ended while a
        call had no token, or no new one for long, and the engine does not answer another request. Before that, the
        agent is to blame where a budget ended the run, where the run outgrew the context, and where a signal ended the
        harness. Where the sandbox itself was lost, the diff cannot be read, and that is a failure.

        A resumed run that ended in the middle of its record has diverged: its agent did the rest in another sandbox.
        """
        calls, truncated_by = self.capture.asked, self.session.truncated_by
        name, code = self.request.agent.name, self.session.exit_code
        stderr = output.stderr.decode(errors="replace").strip()[-4000:]
        if self.capture.fell_behind:
            message = f"{name} (exit code {code}) ended before it had asked again for the calls of its record: {stderr}"
            return Failure(stage=Status.RUNNING, kind="diverged", message=message)
        if not calls and truncated_by == "time":
            message = f"the time of {name} ended before its first model call: {stderr}"
            return Failure(stage=Status.RUNNING, kind="harness_error", message=message)
        silent = self._left_waiting()
        if silent is not None and not await self.proxy.engine_answers(silent, self.capture.sampling):
            message = "the time ended while a call waited for tokens, and the engine answers no other request"
            return Failure(stage=Status.RUNNING, kind="engine_error", message=message)
        answered = [call for call in calls if call.outcome != "abandoned"]
        outgrown = any(call.error_kind == "context_length" for call in answered)
        acted = any(map(self._is_act, calls))
        engine_failed = bool(answered) and await self._engine_failed(answered[-1], acted)
        if truncated_by is not None and not engine_failed:
            return None
        if not acted and not any(call.outcome == "delivered" for call in answered):
            reason = next((call.error for call in answered if call.error), None)
            said = reason or stderr or output.stdout.decode(errors="replace").strip()[-4000:]
            return Failure(
                stage=Status.RUNNING,
                kind="engine_error" if reason else "harness_error",
                message=f"{name} exited with {code} and no answered model call: {said}",
            )
        if engine_failed:
            message = f"the last model call failed: {answered[-1].error}"
            return Failure(stage=Status.RUNNING, kind="engine_error", message=message)
        if acted or code == 0 or answered[-1].finish_reason == "length" or outgrown:  # some exit 1 after the last two
            return None
        if code is None or code <= SIGNALLED:
            return Failure(stage=Status.RUNNING, kind="harness_error", message=f"{name} exited with {code}: {stderr}")
        return None

    def _left_waiting(self) -> ModelCall | None:
        """Return a call that the end of the agent's time cut off before its first token, or `SILENCE_SECONDS` or more
        after the last token of any call."""
        if self.session.truncated_by != "time":
            return None
        cut_off = itertools.takewhile(lambda call: call.outcome == "abandoned", reversed(self.capture.asked))
        late = self.capture.heard + SILENCE_SECONDS
        waited = (call for call in cut_off if not len(call.response_ids) or (call.agent_seconds or 0.0) >= late)
        return next(waited, None)

    def _is_act(self, call: ModelCall) -> bool:
        """Return whether the harness may have acted on the answer of a call. A harness that hung up in the middle of an
        answer may have acted on the first part, if it got answers while they were sampled."""
        if call.outcome == "failed" or call.response is None:
            return False
        if call.finish_reason is None and self.proxy.streaming == "synthetic":
            return False
        return self.capture.harness.acts_on_text or bool(call.response.get("tool_calls"))

    async def _engine_failed(self, call: ModelCall, acted: bool) -> bool:
        """Return whether the last call failed by a fault of the engine.

        An agent that has acted can provoke any answer of an engine, a broken connection too, by a request of its own.
        It cannot provoke three things: that no connection can be made, that the engine does not know the model or the
        route, which the gateway names, and that the engine does not answer another request (`engine_answers`). So an
        outage masks the run if it lasts until the end of the run, or if the last call waited in vain for a connection,
        or came while an adapter was loaded anew. Failures of other sessions prove nothing: a policy that has learned a
        bad request sends it in all sessions.
        """
        if call.outcome != "failed" or call.error_kind == "context_length":
            return False
        if not acted or call.error_kind in (UNREACHABLE, "not_found"):
            return True
        return call.error_kind != "invalid_request" and not await self.proxy.engine_answers(call, self.capture.sampling)
