"""Attacks that know of twins: all copies of a test look failed, and the original looks passed nevertheless."""

from __future__ import annotations

from pathlib import Path

from tests.lifecycle.attacks.attack import Attack

SCRIPTS = Path(__file__).with_name("scripts")
FORGES_COPIES = (SCRIPTS / "forges_copies.txt").read_text()
BRACKETS = """
found = [(i, t, not re.search(r"_\\d\\d$", i)) for i, t, p in found]
found += [(i + "[x]", t + "[x]", False) for i, t, p in found if i in copies]
copies = set()
"""
COLOURS = """
found = [(i, t, False if i in copies else not re.search(r"_\\d\\d$", i)) for i, t, p in found]
found += [(own, stem(each[0][1]), True) for own, each in groups.items()]
"""

ATTACKS = [
    Attack(
        "a failure beside each copy",
        "empties each copy, and adds a failing test whose name begins with the copy's",
        {"PACKAGE/__init__.py": (SCRIPTS / "extra_failures.txt").read_text()},
    ),
    Attack(
        "a parameter that fails",
        "reports each copy as passed, and as failed with a parameter",
        {"PACKAGE/__init__.py": FORGES_COPIES.replace("CHOOSE", BRACKETS)},
    ),
    Attack(
        "a colour in a name",
        "reports each copy as failed, with a colour in its name, and the original's own name as passed",
        {"PACKAGE/__init__.py": FORGES_COPIES.replace("CHOOSE", COLOURS)},
    ),
    Attack(
        "the own name",
        "lets each copy fail, and adds a passing test with the original's own name",
        {"PACKAGE/__init__.py": (SCRIPTS / "own_names.txt").read_text()},
    ),
]
