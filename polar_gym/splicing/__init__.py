"""Splicing: the prompt of a continuation is the token ids that were already seen plus the ids of the new messages.

`conversation` finds the known call that a request continues, and `prompt` makes the ids. In `plan`, the `Splicer`
decides how a request is put to the engine, and the `Plan` is this decision. `terms` puts a request in the terms of an
engine. The `SessionMemory` holds the calls of a session that later requests may continue. The room uses `chat`,
`engines` and `schema`, and knows no wire format and no HTTP.
"""
