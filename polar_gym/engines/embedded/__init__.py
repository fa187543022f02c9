"""The embedded engine: no server, no download, and for the scripted policy no torch.

It answers as vLLM does: prompt ids echoed, sampled ids with the end-of-turn token, logprobs, finish reasons, hermes
tool calls, thinking in `reasoning`. There are two policies. `scripted` runs a list of shell commands through the shell
tool that the harness offers. Its logprobs are 0.0, because it is deterministic. `transformers` samples from a local
model.
"""

from polar_gym.engines.embedded.engine import EmbeddedEngine
from polar_gym.engines.embedded.options import EmbeddedOptions, Script

ENGINE = EmbeddedEngine

__all__ = ["ENGINE", "EmbeddedEngine", "EmbeddedOptions", "Script"]
