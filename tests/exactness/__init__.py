"""An auditor of the books: a recording proxy before the engine, and laws over the recording and the gateway's files.

`recorder`, `recording`, `books`, `matching`, `laws`, `counters` and `forward` import nothing of the package: they read
bytes with readers of their own. `stand_in` is an engine in vLLM's form that tells what it sampled. `gateway` is the
audited process, and the only module here that uses the package. `stage` starts all of them, `clients` makes requests on
the four wires, `cases` has the named cases, `fuzz` the random sessions, `mutations` the planted mistakes.
"""
