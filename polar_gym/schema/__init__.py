"""Every record that crosses a process boundary, and nothing else.

A `TaskRequest` expands into `num_samples` sessions (`request`). A `Session` is one harness run; every model call it
makes is a `ModelCall` (`call`). When the run ends, the calls become `Trace`s. Together with the record of the session's
token counts, `Fidelity`, they are a `Trajectory` (`trajectory`). Trajectory, `EvaluationResult` and reward leave as one
`Episode` (`episode`).

Token ids, masks and logprobs are numpy arrays in memory (9 times smaller than lists) and plain JSON lists outside.
"""

from polar_gym.schema.call import (
    TIME_UP,
    Kind,
    Message,
    ModelCall,
    Replayed,
    SamplingMask,
    Score,
    ToolAttempt,
    ToolDefinition,
    ToolDifference,
    ToolStatus,
    WeightVersion,
)
from polar_gym.schema.episode import (
    Artifacts,
    EngineInfo,
    Episode,
    EvaluationResult,
    Failure,
    OwnGrammar,
    ReplayRecord,
    Session,
    Status,
    Timing,
)
from polar_gym.schema.request import (
    HARNESS_SECONDS,
    Budget,
    BuilderSpec,
    Environment,
    EvaluatorSpec,
    HarnessSpec,
    InsidePath,
    PluginSpec,
    Retries,
    RuntimeSpec,
    Sampling,
    StartFrom,
    TaskRequest,
    Workspace,
)
from polar_gym.schema.trajectory import Break, Fidelity, Trace, Trajectory, Turn

__all__ = [
    "HARNESS_SECONDS",
    "TIME_UP",
    "Artifacts",
    "Break",
    "Budget",
    "BuilderSpec",
    "EngineInfo",
    "Environment",
    "Episode",
    "EvaluationResult",
    "EvaluatorSpec",
    "Failure",
    "Fidelity",
    "HarnessSpec",
    "InsidePath",
    "Kind",
    "Message",
    "ModelCall",
    "OwnGrammar",
    "PluginSpec",
    "ReplayRecord",
    "Replayed",
    "Retries",
    "RuntimeSpec",
    "Sampling",
    "SamplingMask",
    "Score",
    "Session",
    "StartFrom",
    "Status",
    "TaskRequest",
    "Timing",
    "ToolAttempt",
    "ToolDefinition",
    "ToolDifference",
    "ToolStatus",
    "Trace",
    "Trajectory",
    "Turn",
    "WeightVersion",
    "Workspace",
]
