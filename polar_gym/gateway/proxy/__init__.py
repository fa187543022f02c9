"""The proxy: the HTTP port that harnesses talk to instead of a model API, and the record of their calls.

`proxy` serves the port and asks the engine. `exchange` is one call on its way, `sending` writes its answer, `capture`
is what the proxy knows of a session, and `generation` lets calls through or holds them. `journal` writes each call to
the session's file, with `shared_prompts` for its memory. The room uses `chat`, `engines`, `harnesses`, `http`,
`providers`, `schema` and `splicing`, and knows neither nodes nor stages of sessions.
"""
