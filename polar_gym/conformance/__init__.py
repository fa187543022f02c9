"""Whether a harness works with the gateway: the real program in a real sandbox, with a scripted policy.

`checks` runs the sessions and makes the rows of the report. `rehearsal` and `acting` are the scripted engines: turns of
commands and failures, sub-agents, tools of an environment and full contexts. `versions` asks npm and PyPI
for the newest version of a harness.
"""
