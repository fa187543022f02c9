"""The proxy: the HTTP port that harnesses talk to instead of a model API, and the record of their calls.

`proxy` serves the port and asks the engine. `receiving` reads a request or refuses it, `exchange` holds one call on its
way, `sending` writes the answer, and `capture` holds the key, the limits and the calls of a session. `generation` lets
calls through to the engine or holds them back. `journal` writes each call to the session's file, and `shared_prompts`
keeps its memory small. `mcp` serves the tools of an environment. The room uses `chat`, `engines`, `evaluators`,
`harnesses`, `http`, `providers`, `schema` and `splicing`. It knows neither nodes nor the stages of a session.
"""
