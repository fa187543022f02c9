"""Tests of which one assertion is left."""

import ast
from collections.abc import Callable

from polar_gym.curation.alone import alone
from polar_gym.evaluators.expectations import find_tests

SOURCE = b"""
def test_shelf():
    with pytest.raises(KeyError):
        shelf["pear"]
    assert shelf["plum"] == 731
    assert shelf["fig"] == 912
"""


def test_an_expected_exception_is_no_assertion_that_stays():
    (test,) = find_tests(SOURCE)
    place = next(each for each in test.expectations if SOURCE[slice(*each.span)] == b"731")
    made = ast.unparse(ast.parse(alone(SOURCE, test, place, "test_copy")))
    assert made == "\n".join(
        [
            "def test_copy():",
            "    try:",
            "        shelf['pear']",
            "    except BaseException:",
            "        pass",
            "    assert shelf['plum'] == 731",
            "    shelf['fig'] == 912",
        ]
    )


def test_the_expected_exception_stays_that_is_the_place_itself():
    (test,) = find_tests(SOURCE)
    place = next(each for each in test.expectations if SOURCE[slice(*each.span)] == b"KeyError")
    made = alone(SOURCE, test, place, "test_copy").decode()
    assert "with pytest.raises(KeyError):" in made
    assert "assert" not in made


def test_an_f_string_with_nested_quotes_can_be_read_by_older_pythons():
    source = b"""
def test_join():
    words = ["pear", "plum"]
    assert f"{', '.join(words)} {len(words)!r:>{1 + 1}}" == "pear, plum  2"
"""
    (test,) = find_tests(source)
    made = alone(source, test, test.expectations[0], "test_copy").decode()
    assert not any(isinstance(each, ast.JoinedStr) for each in ast.walk(ast.parse(made)))
    names: dict[str, Callable[[], None]] = {}
    exec(made, names)
    names["test_copy"]()
