"""Grades patches as a rollout would: in sandboxes with a task's workspace and packages, by the same evaluator."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from polar_gym.errors import ConfigError, explain
from polar_gym.evaluators import EVALUATORS, EvaluationContext
from polar_gym.evaluators.blame import judge
from polar_gym.runtimes import RUNTIMES, Command, Mount, Runtime, Sandbox, SandboxRequest, check_offered
from polar_gym.runtimes.agent import PATH
from polar_gym.schema import EvaluationResult, EvaluatorSpec, HarnessSpec, RuntimeSpec, Session, TaskRequest
from polar_gym.tasks import Task
from polar_gym.tasks.request import UngradableError, instruction, with_task
from polar_gym.workspaces.history import pack_baseline, set_base
from polar_gym.workspaces.shared import KEEP_BYTES, Repositories
from polar_gym.workspaces.venv import ensure_venv, inside, variables


class Bench:
    """A runtime to grade on. `async with Bench(...)` leaves only cached files behind, and no sandbox.

    `async with` raises `ConfigError` where the machine lacks a part that the runtime needs.
    """

    def __init__(
        self,
        runtime: RuntimeSpec,
        cache: Path,
        evaluator: EvaluatorSpec | None = None,
        *,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        """Take the specs of a run's config. `evaluator`: None: `swe`, and `harbor` for a task with a container.

        `keep_bytes`: how much of repositories that no sandbox uses is kept for later sandboxes.
        """
        self.spec = runtime
        self.cache = cache
        self._evaluator = evaluator
        self._runtimes: dict[str, Runtime] = {}
        self._runtime = self._runtime_of(runtime)
        self._scratch = tempfile.TemporaryDirectory(prefix="polar-gym-bench-")
        self._repositories = Repositories(Path(self._scratch.name), keep_bytes)

    async def __aenter__(self) -> Self:
        if missing := self._runtime.check():
            await self.__aexit__()  # Python calls it only for a context that was entered
            raise ConfigError("runtime: " + "; ".join(missing))
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._scratch:
            await self._repositories.close()
            for runtime in self._runtimes.values():
                await runtime.close()

    async def evaluate(self, task: Task, diff: bytes) -> EvaluationResult:
        """Return the grade of a session that left `diff`."""
        return await self.judge(self.context(task, diff))

    async def judge(self, context: EvaluationContext) -> EvaluationResult:
        """Return the grade of what the context tells."""
        limit = context.request.evaluator.timeout_seconds + context.request.runtime.init_timeout_seconds
        return await judge(EVALUATORS.make(context.request.evaluator), context, limit)

    def context(self, task: Task, diff: bytes) -> EvaluationContext:
        """Return what an evaluator is told of a session that left `diff`.

        Raises `UngradableError` where the evaluator does not take the options of the config and the task.
        """
        request = self._request(task)
        _check_options(request.evaluator, task)
        return EvaluationContext(
            request=request,
            session=Session(
                session_id=f"bench-{uuid.uuid4().hex[:12]}",
                task_id=task.instance_id,
                sample_index=0,
                harness=request.agent.name,
                exit_code=0,
            ),
            calls=[],
            diff=diff,
            final_message="",
            fresh_sandbox=lambda: self.sandbox(task),
        )

    @asynccontextmanager
    async def sandbox(self, task: Task, *, for_agent: bool = False, image: str | None = None) -> AsyncIterator[Sandbox]:
        """Start a sandbox with the task's workspace at its base commit, and no network.

        `for_agent`: without the tests of the image that are hidden from the agent. `image`: None: the task's.
        """
        name = f"bench-{uuid.uuid4().hex[:12]}"
        try:
            request = await self._sandbox_request(task, name)
            try:
                runtime = await asyncio.to_thread(self._runtime_of, request.spec)
            except ConfigError as error:
                raise UngradableError(f"{task.place or task.instance_id}: {error}") from error
            request.spec.image = image or request.spec.image
            sandbox = await runtime.start(request)
            try:
                if task.workspace is None and request.spec.image is not None and request.spec.scope == "workspace":
                    await set_base(sandbox, request.spec.workspace, for_agent=for_agent)
                yield sandbox
            finally:
                await sandbox.stop()
        finally:
            await self._repositories.give_back(name)

    async def base(self, task: Task, sandbox: Sandbox) -> bytes:
        """Return the archive of `.git` to which a harness's diff in such a sandbox is taken, before it changes. Raises
        `SandboxError`."""
        if task.workspace is None:
            return await pack_baseline(sandbox, self._request(task).runtime.workspace.path)
        name = f"bench-{uuid.uuid4().hex[:12]}"
        try:
            repository = await self._repositories.take(Path(task.workspace), name)
            return await asyncio.to_thread(repository.base.read_bytes)
        finally:
            await self._repositories.give_back(name)

    async def try_sandbox(self) -> None:
        """Start a sandbox with an empty workspace, and end it. Raises as `sandbox` does: the machine is at fault."""
        with tempfile.TemporaryDirectory(dir=self._scratch.name) as empty:
            task = Task(instance_id="empty", problem_statement="Nothing.", workspace=empty, test_command="true")
            async with self.sandbox(task) as sandbox:
                await sandbox.exec(Command(argv=["true"]))

    def _runtime_of(self, spec: RuntimeSpec) -> Runtime:
        """Return the runtime with these options. Raises `ConfigError` where it cannot give such sandboxes."""
        key = repr(spec.options)
        if key not in self._runtimes:
            self._runtimes[key] = RUNTIMES.make(spec)
        check_offered(spec, self._runtimes[key])
        return self._runtimes[key]

    def _request(self, task: Task) -> TaskRequest:
        request = TaskRequest(
            task_id=task.instance_id,
            instruction=instruction(task),
            runtime=self.spec,
            agent=HarnessSpec(name="command"),
            evaluator=self._evaluator or EvaluatorSpec(name="swe" if task.container is None else "harbor"),
        )
        return with_task(request, task)

    async def _sandbox_request(self, task: Task, name: str) -> SandboxRequest:
        """Return the request for the sandbox `name`, whose repository is this sandbox's until it is given back."""
        spec = self._request(task).runtime.model_copy(deep=True)
        mounts: list[Mount] = []
        if spec.workspace.python_requirements:
            venv = await asyncio.to_thread(ensure_venv, spec.workspace.python_requirements, self.cache)
            mounts.append(Mount(venv, inside(venv)))
            spec.environment |= variables(venv, spec.environment.get("PATH", PATH))
        workspace = None
        if task.workspace is not None:
            workspace = (await self._repositories.take(Path(task.workspace), name)).path
        return SandboxRequest(session_id=name, spec=spec, workspace=workspace, mounts=mounts)


def _check_options(evaluator: EvaluatorSpec, task: Task) -> None:
    try:
        EVALUATORS.options(evaluator)
    except ValidationError as error:
        told = explain(error, EVALUATORS.accepted(evaluator.name), "evaluator", also=EvaluatorSpec.model_fields)
        raise UngradableError(f"{task.place or task.instance_id}: {told}") from error
