"""Calls functions with recorded arguments and with variants of these, and prints what each call did.

`replay.py make` turns the records of `sitecustomize` into `inputs`. `replay.py run` takes on stdin the wanted files,
each with its lines of interest, and prints a JSON list: for each input the function's name, the arguments, whether a
line of interest ran, and the outcome (null: the outcome cannot be compared).
"""

import contextlib
import hashlib
import importlib
import inspect
import itertools
import json
import os
import pickle
import random
import re
import resource
import signal
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
VARIANTS = 25
"""The number of variants of each recorded call."""
CALLS = 6000
"""The number of calls in one run at most."""
SECONDS = 1.0
"""The time limit of one call."""
PLAIN = (type(None), bool, int, float, complex, str, bytes)


def make():
    entries, inputs, rng = [], {}, random.Random(0)
    with open(os.path.join(HERE, "records"), "rb") as file, contextlib.suppress(EOFError):
        while True:
            entries.append(pickle.load(file))
    for entry in entries:
        sys.path[:] = entry["path"]
        others = [each["arguments"] for each in entries if each["name"] == entry["name"]]
        with contextlib.suppress(Exception):
            literals = [each for each in function_of(entry).__code__.co_consts if isinstance(each, PLAIN)]
            inputs[entry["name"], entry["arguments"]] = entry
            for _ in range(VARIANTS):
                arguments, keywords = pickle.loads(entry["arguments"])
                pool = [None, 0, "", [], {}, *literals, *pickle.loads(rng.choice(others))[0]]
                for _ in range(rng.choice((1, 1, 2))):
                    place = rng.choice([*keywords, *range(len(arguments))])
                    group = keywords if place in keywords else arguments
                    group[place] = rng.choice((varied(group[place], pool, rng), rng.choice(pool)))
                with contextlib.suppress(Exception):
                    data = pickle.dumps((arguments, keywords))
                    inputs[entry["name"], data] = dict(entry, arguments=data)
    with open(os.path.join(HERE, "inputs"), "wb") as file:
        pickle.dump(list(inputs.values()), file)


def varied(value, pool, rng):
    """Return a value that is like `value`: by its own type, or one of the pool of the same type."""
    like = [each for each in pool if type(each) is type(value)]
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return rng.choice([value + 1, value - 1, -value, value * 2, *like])
    if isinstance(value, (str, bytes, list, tuple)):
        start, end = sorted(rng.choices(range(len(value) + 1), k=2))
        joined = put(value, start, start, rng.choice([value[start:end], *like]))
        parts = [put(value, start, end, value[:0]), value[start:end], value[::-1], joined, joined, *like]
        if isinstance(value, (list, tuple)) and value:
            new = [varied(each, pool, rng) if place == start else each for place, each in enumerate(value)]
            parts += [type(value)(new)] * 3
        return rng.choice(parts)
    held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    if held and not callable(value):
        key = rng.choice(list(held))
        held[key] = varied(held[key], pool, rng)
    return value


def put(value, start, end, piece):
    return value[:start] + piece + value[end:]


def function_of(entry):
    """Return the plain function of an entry, below its decorators."""
    found = importlib.import_module(entry["module"])
    for part in entry["name"].partition("::")[2].split("."):
        found = inspect.getattr_static(found, part)
    while not inspect.isfunction(found) or hasattr(found, "__wrapped__"):
        inner = (getattr(found, name, None) for name in ("__wrapped__", "__func__", "fget", "func"))
        found = next(each for each in inner if each is not None)
    return found


def run(wanted):
    with open(os.path.join(HERE, "inputs"), "rb") as file:
        inputs = [entry for entry in pickle.load(file) if entry["name"].partition("::")[0] in wanted]
    for entry in inputs[:: len(inputs) // CALLS + 1]:
        sys.path[:] = entry["path"]
        yield [entry["name"], *called(entry, wanted[entry["name"].partition("::")[0]])]


def called(entry, lines):
    """Return the arguments in a short form, whether one of the lines ran, and the outcome."""
    reached, shown = [], ""

    def trace(frame, event, _):
        if frame.f_code.co_filename != function.__code__.co_filename:
            return None
        reached.extend([1] * (event == "line" and frame.f_lineno in lines))
        return trace

    try:
        function = function_of(entry)
        arguments, keywords = pickle.loads(entry["arguments"])
        texts = [*map(repr, arguments), *("%s=%r" % each for each in keywords.items())]
        shown = re.sub(" at 0x[0-9a-f]+", "", ", ".join(texts))[:100]
        random.seed(0)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        sys.settrace(trace)
        try:
            result = function(*arguments, **keywords)
            outcome = ["returned", list(itertools.islice(result, 1000)) if hasattr(result, "__next__") else result]
        except TimeoutError:
            return [shown, bool(reached), "timed out"]
        except BaseException as error:  # noqa: BLE001 - the outcome of the call
            outcome = ["raised", type(error)]
        sys.settrace(None)
        told = described([outcome, arguments, keywords])
        return [shown, bool(reached), hashlib.sha256(told.encode(errors="surrogatepass")).hexdigest()]
    except Exception:  # noqa: BLE001 - the input does not fit, or the outcome has no description
        return [shown, False, None]
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_REAL, 0)


def described(value, above=()):
    """Return a text that is equal for equal values. Raises an error where a value can have none."""
    if type(value) in PLAIN:
        return repr(value)
    if id(value) in above:
        return "above"
    above = (*above, id(value))
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__module__ + "." + value.__qualname__
    if type(value) in (set, frozenset):
        return "{%s}" % ", ".join(sorted(described(each, above) for each in value))
    if type(value) is dict:
        value = ("dict", list(value.items()))
    if type(value) not in (list, tuple):
        made = value.__reduce_ex__(4)
        value = [type(value), *(list(each) if hasattr(each, "__next__") else each for each in made)]
    return "%s(%s)" % (type(value).__name__, ", ".join(described(each, above) for each in value))


def _late(*_):
    raise TimeoutError


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    signal.signal(signal.SIGALRM, _late)
    output, sys.stdout = sys.stdout, sys.stderr
    if sys.argv[1] == "make":
        make()
    else:
        json.dump(list(run(json.load(sys.stdin))), output)
