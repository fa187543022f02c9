"""A search for diffs that are rewarded without a solution: fragments of attacks, and their combination.

The fragments are written without knowledge of the grader's defences: a defence is only as good as what it was not made
for. `make show-search` runs the search.

- `fragments`: the parts of attacks, by family.
- `fragment`: the record of one part.
- `grounds`: the tasks that are attacked.
- `plan`: what one try combines, as data; `drawing` draws and changes plans.
- `triggers`: the moments at which a part of Python runs.
- `building`: the files and commands of a plan.
- `exploring`: draws, grades and counts until the time is over.
- `weak_grader`: graders without a defence, which the search must beat.
"""
