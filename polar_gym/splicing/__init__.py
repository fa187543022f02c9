"""Splicing: the prompt of a continuation is the token ids that were already seen plus the ids of what is new.

`conversation` finds the known call that a request continues. `prompt` makes the ids. `plan` holds what is remembered of
a session (`SessionMemory`), decides how a request is put to the engine (`Splicer`), and says so (`Plan`). The room uses
`chat`, `engines` and `schema`, and knows no wire format and no HTTP.
"""
