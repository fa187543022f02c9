"""The environment variables of the official SDKs, through which a program finds the proxy without knowing of us."""

from __future__ import annotations

from polar_gym.harnesses import LaunchContext


def sdk_environment(context: LaunchContext) -> dict[str, str]:
    """Return the variables of the OpenAI, Anthropic and Google SDKs.

    No SDK has a variable for the model's name, so `POLAR_GYM_MODEL` holds it. `POLAR_GYM_MCP_URL` is the MCP server
    with the environment's tools, if there is one.
    """
    return {
        "OPENAI_BASE_URL": f"{context.base_url}/v1",
        "OPENAI_API_KEY": context.api_key,
        "ANTHROPIC_BASE_URL": context.base_url,
        "ANTHROPIC_API_KEY": context.api_key,
        "GOOGLE_GEMINI_BASE_URL": context.base_url,
        "GEMINI_API_KEY": context.api_key,
        "POLAR_GYM_MODEL": context.spec.model_name,
        **({"POLAR_GYM_MCP_URL": context.mcp_url} if context.mcp_url else {}),
    }
