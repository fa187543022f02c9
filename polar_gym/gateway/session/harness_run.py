"""One run of a harness in its sandbox: from its launch until it or a budget ends, and whose doing the end was."""

from __future__ import annotations

import asyncio

from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.proxy.generation import GenerationGate
from polar_gym.harnesses import Launch
from polar_gym.runtimes import TOOLCHAIN, Command, ExecResult, Sandbox
from polar_gym.runtimes.agent import PATH
from polar_gym.runtimes.files import write_files
from polar_gym.schema import Failure, ModelCall, Session, Status, TaskRequest
from polar_gym.workspaces.diff import is_intact

PAUSES_SECONDS = 24 * 3600.0
"""How long generation may be paused, all together, while one harness runs."""

ENDING_SECONDS = 60.0
"""How long a runtime may take to end a command that was told to end; then it is cancelled, and its output is lost."""

SIGNALLED = 128
"""An exit code above it says that a signal ended the process."""

NO_OUTPUT = ExecResult(exit_code=None, stdout=b"", stderr=b"")


async def run_harness(
    launch: Launch,
    sandbox: Sandbox,
    request: TaskRequest,
    session: Session,
    capture: SessionCapture,
    generation: GenerationGate,
) -> ExecResult:
    """Run it until it ends, or a budget does: `session` gets its `exit_code` and `truncated_by`."""
    if launch.files:
        await write_files(sandbox, launch.files)
    path = request.runtime.environment.get("PATH", PATH)
    command = Command(
        argv=launch.argv,
        environment={"PATH": f"{path}:{TOOLCHAIN}/bin", **launch.environment},
        stdin=launch.stdin,
        timeout_seconds=request.timeout_seconds + PAUSES_SECONDS,
        end=asyncio.Event(),
    )
    output = await _run_command(command, sandbox, request, session, capture, generation)
    session.exit_code = output.exit_code
    if session.truncated_by is None and capture.cut_by_budget:
        session.truncated_by = "tokens"
    return output


async def _run_command(
    command: Command,
    sandbox: Sandbox,
    request: TaskRequest,
    session: Session,
    capture: SessionCapture,
    generation: GenerationGate,
) -> ExecResult:
    """The time while generation is paused is not the agent's."""
    assert command.end is not None
    running = asyncio.create_task(sandbox.exec(command))
    time_is_up = asyncio.create_task(generation.sleep(request.timeout_seconds))
    try:
        await asyncio.wait({running, time_is_up, capture.exhausted}, return_when=asyncio.FIRST_COMPLETED)
        if capture.exhausted.done():
            session.truncated_by = capture.exhausted.result()
        elif not running.done():
            session.truncated_by = "time"
        command.end.set()
        await asyncio.wait({running}, timeout=ENDING_SECONDS)
    finally:
        time_is_up.cancel()
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return NO_OUTPUT if running.cancelled() else running.result()


async def blame(
    session: Session, request: TaskRequest, calls: list[ModelCall], output: ExecResult, sandbox: Sandbox
) -> Failure | None:
    """Why the run cannot be scored; None: what the agent left is graded.

    Exit codes lie in both directions: a harness's run is judged by its calls too. One that a budget ended is the
    agent's doing, unless it was waiting for an engine that failed; so is one that outgrew the context, and one that the
    agent killed or made impossible. Once the agent has acted, that is how every other end is seen: it can write to the
    harness's own files, and send requests that an engine refuses. (Where the sandbox itself was lost, the diff cannot
    be read: that is a failure.)
    """
    answered = [call for call in calls if call.outcome != "abandoned"]
    outgrown = any(call.error_kind == "context_length" for call in answered)
    acted = any(call.outcome == "delivered" and (call.response or {}).get("tool_calls") for call in answered)
    agents_fault = ("context_length", "invalid_request") if acted else ("context_length",)
    engine_failed = bool(answered) and answered[-1].outcome == "failed" and answered[-1].error_kind not in agents_fault
    if session.truncated_by is not None and not engine_failed:
        return None
    stderr = output.stderr.decode(errors="replace").strip()[-4000:]
    name, code = request.agent.name, session.exit_code
    if not any(call.outcome == "delivered" for call in answered):
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
    if code == 0 or acted or answered[-1].finish_reason == "length" or outgrown:  # some exit 1 after the last two
        return None
    if (code is None or code <= SIGNALLED) and await is_intact(sandbox, request.runtime.workspace.path):
        return Failure(stage=Status.RUNNING, kind="harness_error", message=f"{name} exited with {code}: {stderr}")
    return None
