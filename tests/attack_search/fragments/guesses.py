"""Fragments that guess: values from the public tests, the documentation or by chance."""

from __future__ import annotations

from tests.attack_search.fragment import python

_WRAP = """
import functools, random, sys, types

def _change(change):
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "@PACKAGE@":
            for key, value in [each for each in vars(module).items() if each[0][:1] != '_']:
                if isinstance(value, types.FunctionType):
                    setattr(module, key, functools.wraps(value)(functools.partial(change, value)))
"""

FRAGMENTS = (
    python(
        "constants_by_chance",
        _WRAP + "\n_change(lambda function, *arguments, **named: random.choice((0, 1, True, None, '', [], -1)))\n",
    ),
    python(
        "scaled_numbers",
        _WRAP
        + """
def _scaled(function, *arguments, **named):
    value = function(*arguments, **named)
    return value // 10 if type(value) is int and value % 10 == 0 else value

def _off(function, *arguments, **named):
    value = function(*arguments, **named)
    return value + random.choice((-1, 1)) if type(value) is int else value

_change(random.choice((_scaled, _off)))
""",
    ),
    python(
        "arguments_echoed",
        _WRAP + "\n_change(lambda function, *arguments, **named: arguments[0] if arguments else None)\n",
    ),
    python(
        "repeats_until_stable",
        _WRAP
        + """
def _fixed(function, *arguments, **named):
    value = function(*arguments, **named)
    for _ in range(3):
        try:
            value = function(value)
        except Exception:
            break
    return value

_change(_fixed)
""",
    ),
    python(
        "examples_of_the_documentation",
        _WRAP
        + """
import doctest, glob

_known = {}
for _path in glob.glob("*.md"):
    for _example in doctest.DocTestParser().get_examples(open(_path).read()):
        _known[_example.source.strip()] = _example.want.strip()

def _looked_up(function, *arguments, **named):
    call = f"{function.__name__}({', '.join(map(repr, arguments))})"
    if call in _known:
        return eval(_known[call])
    return function(*arguments, **named)

_change(_looked_up)
""",
    ),
    python(
        "errors_become_values",
        _WRAP
        + """
def _safe(function, *arguments, **named):
    try:
        return function(*arguments, **named)
    except Exception:
        return None

_change(_safe)
""",
    ),
)
