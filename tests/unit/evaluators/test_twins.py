"""Twins: the right copies of a test pass, every altered copy fails, and nothing tells them apart."""

import ast
import random
import unittest
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar_gym.curation.twins import Trial, _altered
from polar_gym.evaluators.alternatives import MOST, drawn
from polar_gym.evaluators.expectations import find_tests
from polar_gym.evaluators.parsers import FAILED, PASSED
from polar_gym.evaluators.twins import MOST_COPIES, Twins, _variants, draw_twins, rounds, weak_tests
from polar_gym.evaluators.verdict import Verdict

FILE = "tests/test_shop.py"
SOURCE = """\
import unittest
import pytest
from shop import Basket, total

CASES = [(1, 2)]

@pytest.mark.parametrize("price, expected", [(1, "eins"), pytest.param(2, "zwei"), (3, "drei")])
def test_table(price, expected):
    assert total(price) == expected


async def test_async(basket):
    assert total([1, 2]) == -3.5 and "a" in total("b")  # Wörter


class TestShop(unittest.TestCase):
\tdef test_tabs(self):
\t\texpected = {"a": [1, None], "b": ()}
\t\tself.assertEqual(total(), expected)

\t@unittest.skipIf(False, "no")
\tdef test_words(self):
\t\twith self.assertRaises(KeyError):
\t\t\ttotal("x")
\t\tself.assertEqual(
\t\t\ttotal(1),
\t\t\t"one"
\t\t\t"two",
\t\t)
\t\tself.assertEqual(total(f"{1}"), [Basket(1), Basket(2, "big")])
\t\tself.assertTrue(total(3)); assert not total(2) is None
\t\tfor given, expected in [(1, b"x"), (2, b"y")]:
\t\t\tself.assertEqual(total(given), expected)
\t\tself.check_total(1, 17)

def test_last(): assert total(1) != 2"""


def places(source: str = SOURCE) -> dict[str, dict[str, list[list[int]]]]:
    found = find_tests(source.encode())
    return {FILE: {test.qualified_name: [[*each.span, 1] for each in test.expectations] for test in found}}


def texts(source: str = SOURCE) -> dict[str, list[str]]:
    data = source.encode()
    return {
        test.qualified_name: [data[each.start : each.end].decode() for each in test.expectations]
        for test in find_tests(data)
    }


def test_expectations_are_found() -> None:
    assert texts() == {
        "test_table": ['"eins"', '"zwei"', '"drei"', "=="],
        "test_async": ["3.5", "in"],
        "TestShop.test_tabs": ['"a"', "1", "None", '"b"', "()"],
        "TestShop.test_words": [
            *("KeyError", '"one"\n\t\t\t"two"', "1", "2", '"big"', "assertTrue", "not total(2) is None"),
            *('b"x"', 'b"y"', "assertEqual", "17"),
        ],
        "test_last": ["!="],
    }


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("self.assertAlmostEqual(total(1000), 1000, delta=600)", ["assertAlmostEqual"]),
        ("self.assertAlmostEqual(total(1000), 1000, -3)", ["assertAlmostEqual"]),
        ("assert total(1000) == pytest.approx(1000, rel=0.6)", ["=="]),
        (
            "for n, own in [(2, 1000)]: assert math.isclose(total(n), own, abs_tol=600)",
            ["math.isclose(total(n), own, abs_tol=600)"],
        ),
        ("assert total(1000) == approx(1000, 0.4)", ["=="]),
        ("assert numpy.isclose(total(1000), 1000, 0.6)", ["numpy.isclose(total(1000), 1000, 0.6)"]),
        ("for n, own in [(2, 1000)]: assert abs(total(n) - own) < 600", ["<"]),
        ("self.assertAlmostEqual(total(1000), 1000)", ["1000"]),
        ("assert total(1000) == approx(1000)", ["1000"]),
    ],
)
def test_literals_within_a_tolerance_are_no_expectations(statement: str, expected: list[str]) -> None:
    """Guards against an honest 1450, within 600 of 1000, that is called forged because it is within 600 of 2000 too."""
    (found,) = texts(f"def test_total(self):\n    {statement}\n").values()
    assert found == expected


def test_no_other_expected_exception_is_one_that_the_test_accepts() -> None:
    """Guards against an honest ZeroDivisionError that is called forged where the reference raises ValueError."""
    (test,) = find_tests(b"def test_x(self):\n    self.assertRaises((ValueError, ZeroDivisionError), f)\n")
    (place,) = test.expectations
    drawn_texts = {text for seed in range(64) for text in place.draw(2, random.Random(seed))}
    assert "ZeroDivisionError" not in drawn_texts
    assert len(drawn_texts) == place.capacity == 7


@pytest.mark.parametrize(
    "source", ["def test_x(: pass", "\x00", "print 'two'", "(" * 500, "\ud800".encode("utf-8", "surrogatepass")]
)
def test_file_that_python_cannot_parse_has_no_tests(source: Any) -> None:
    assert find_tests(source if isinstance(source, bytes) else source.encode()) == []


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 2), st.sampled_from(["\n", "\r\n"]))
def test_copies_differ_in_their_names_and_expectations_only(seed: int, turn: int, newline: str) -> None:
    source = SOURCE.replace("\n", newline)
    twins = draw_twins({FILE: source.encode()}, places(source), turn, random.Random(seed))
    copies = {test.name: test for test in find_tests(twins.texts[FILE])}
    own_names = sorted(test.qualified_name for test in find_tests(source.encode()))
    assert sorted(name for _, name in twins.originals) == own_names
    assert {*twins.originals.values(), *twins.altered} == set(copies)
    assert len(copies) <= MOST_COPIES
    before, after = functions(source), functions(twins.texts[FILE].decode())
    for (_, own), name in twins.originals.items():
        assert after[name] == before[own.rpartition(".")[2]]
    assert len(set(after.values())) == len(after), "two copies are the same test"


def functions(source: str) -> dict[str, str]:
    """Return each test's text without its name, as Python understands it."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            own, node.name = node.name, "test"
            found[own] = ast.unparse(node)
            node.name = own
    return found


@given(
    st.lists(
        st.one_of(st.integers(-99, 10**9), st.text(), st.floats(-1e9, 1e9), st.booleans(), st.binary()),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 99),
)
@example(["10", "01:0¹", b"00"], 0)  # a word of a text that no bytes can hold
def test_no_copy_can_be_told_by_its_distances(values: list[Any], seed: int) -> None:
    """If one copy were at the centre of the others, code that compares the copies would know the original."""
    body = "".join(f"    assert f({number}) == {value!r}\n" for number, value in enumerate(values))
    (test,) = find_tests(f"def test_f():\n{body}".encode())
    variants = _variants(test.expectations, MOST, 0, random.Random(seed))
    assert len(variants) == 2 ** (len(variants).bit_length() - 1)
    rows = [tuple(text for _, text in edits) for edits in variants]
    assert len(set(rows)) == len(rows)
    distances = {
        tuple(sorted(sum(a != b for a, b in zip(mine, other, strict=True)) for other in rows)) for mine in rows
    }
    assert len(distances) == 1


@given(
    st.one_of(st.integers(), st.text(), st.floats(allow_nan=False), st.booleans(), st.none(), st.binary()),
    st.integers(0, 99),
)
def test_drawn_texts_mean_different_values(value: Any, seed: int) -> None:
    (test,) = find_tests(f"def test_f():\n    assert f() == {value!r}\n".encode())
    place = test.expectations[0]
    number = 2 ** (place.capacity.bit_length() - 1)
    drawn = place.draw(number, random.Random(seed))
    if drawn[0] == "==":
        return
    meant = [ast.literal_eval(text) for text in drawn]
    negative = isinstance(value, int | float) and not isinstance(value, bool) and value < 0
    assert meant[0] == (-value if negative else value)  # the place is behind the sign
    assert len(set(map(repr, meant))) == len(meant) == number


@pytest.mark.parametrize(
    ("value", "neighbours"),
    [
        *[(12.35, {"12.34", "12.36"}), (99.99, {"99.98", "100.00"}), (1234567.5, {"1234467.5", "1234667.5"})],
        *[(1234.5, {"1233.5", "1235.5"}), (0.0, {"0.1"}), (1, {"0", "2"}), (0, {"1"}), (300, {"200", "400"})],
    ],
)
def test_of_two_numbers_the_other_one_is_a_neighbour(value: float, neighbours: set[str]) -> None:
    found = drawn(value, frozenset())
    assert found is not None
    pairs = [found[1](2, random.Random(seed)) for seed in range(64)]
    assert {own for own, _ in pairs} == {repr(value)}
    assert {other for _, other in pairs} == neighbours


TOLERANT = """
import unittest
class Test(unittest.TestCase):
    def check_total(self, own, within, expected):
        self.assertTrue(abs(own - expected) <= within)

    def test_total(self):
        self.check_total(total(2), 0.009, 12.35)
        self.check_total(total(3), 0.7, 1)
        self.check_total(total(4), 0.009, 7.25)
"""


def test_places_under_a_tolerance_are_not_admitted_by_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """One neighbour of 12.35 and one of 1 pass with the right solution, and once were not always tried."""
    seeds = count()
    # Sixteen draws by chance miss one of two neighbours once in 65,536 times.
    monkeypatch.setattr("polar_gym.curation.twins.random.SystemRandom", lambda: random.Random(next(seeds)))
    for _ in range(50):
        trial = Trial([LISTED], None, _altered)
        statuses = run(trial.draw({FILE: TOLERANT.encode()}), {2: 12.354, 3: 1.6, 4: 7.25}.__getitem__)
        failed = trial.failed(Verdict(tests={LISTED: PASSED}, resolved=True, statuses=statuses), None)
        texts = [TOLERANT[start:end] for _, _, (start, end) in failed]
        assert texts == ["7.25"]


LISTED = f"{FILE}::Test::test_total"
SHOP = """
import unittest
class Test(unittest.TestCase):
    def test_total(self):
        self.assertEqual(total(2), 20)
        self.assertEqual(total(3), "thirty")
        with self.assertRaises(KeyError):
            total(None)
"""


def honest(price: Any) -> Any:
    return {2: 20, 3: "thirty"}[price]


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def always_equal(price: Any) -> Any:
    return honest(price) if price != 3 else AlwaysEqual()


def run(twins: Twins, total: Any) -> dict[str, str]:
    """Return the statuses of the copies."""
    module: dict[str, Any] = {"total": total}
    exec(twins.texts[FILE], module)
    suite = unittest.TestLoader().loadTestsFromTestCase(module["Test"])
    names = [test.id().rpartition(".")[2] for test in suite]  # type: ignore[attr-defined]
    result = unittest.TestResult()
    suite.run(result)
    failed = {test.id().rpartition(".")[2] for test, _ in [*result.failures, *result.errors]}
    return {name: FAILED if name in failed else PASSED for name in names}


def check(twins: Twins, statuses: dict[str, str]) -> tuple[str, str]:
    return twins.check(statuses, {LISTED: twins.reported(LISTED)}, "the log")


@given(st.integers(0, 10**6), st.integers(0, 2))
def test_correct_code_passes_the_originals_and_fails_the_altered_copies(seed: int, turn: int) -> None:
    twins = draw_twins({FILE: SHOP.encode()}, places(SHOP), turn, random.Random(seed))
    statuses = run(twins, honest)
    assert [name for name, status in statuses.items() if status == PASSED] == list(twins.originals.values())
    assert check(twins, statuses) == ("", "")
    assert (
        twins.reported(f"{LISTED}[test_total]") == f"{FILE}::Test::{next(iter(twins.originals.values()))}[test_total]"
    )


@pytest.mark.parametrize(
    "other",
    [
        f"{FILE}::test_cli[Test-test_total]",
        f"{FILE}::test_cli[test_shop::Test::test_total]",
        "tests.test_shop.test_cli[Test.test_total]",
        f"other/{FILE}::Test::test_total",
        f"{FILE}::test_total",
        f"{FILE}::Test::Inner::test_total",
    ],
)
def test_an_id_of_another_test_is_not_renamed(other: str) -> None:
    """Guards against an original that another test's parameters or words name: the run broke off, or the other test
    counted as missing."""
    twins = draw_twins({FILE: SHOP.encode()}, places(SHOP), 0, random.Random(1))
    assert twins.reported(other) == other


@pytest.mark.parametrize("own", [LISTED, "test_shop.py::Test::test_total[1]", "test_shop.Test.test_total"])
def test_an_id_is_renamed_wherever_the_runner_ran(own: str) -> None:
    twins = draw_twins({FILE: SHOP.encode()}, places(SHOP), 0, random.Random(1))
    (name,) = twins.originals.values()
    assert twins.reported(own) == own.replace("test_total", name)


@given(st.integers(0, 10**6))
def test_object_that_equals_everything_is_noticed_in_one_place_of_three(seed: int) -> None:
    twins = draw_twins({FILE: SHOP.encode()}, places(SHOP), 0, random.Random(seed))
    assert "altered expectation are reported as passed" in check(twins, run(twins, always_equal))[0]


def test_copy_that_is_not_reported_is_a_problem() -> None:
    twins = draw_twins({FILE: SHOP.encode()}, places(SHOP), 0, random.Random(1))
    statuses = run(twins, honest)
    statuses.pop(next(iter(twins.altered)))
    assert check(twins, statuses)[1] == "1 tests with an altered expectation are not reported by the log"


@pytest.mark.parametrize("forged", ["{name}z", "x{name}", "a.py::{name}[x]"])
def test_failure_beside_each_copy_is_no_failure_of_the_copy(forged: str) -> None:
    """Each copy once passed, and counted as failed by another failing test with its name in its id."""
    twins = draw_twins({FILE: SHOP.encode()}, places(SHOP), 0, random.Random(1))
    names = [*twins.originals.values(), *twins.altered]
    statuses = dict.fromkeys(names, PASSED) | {forged.format(name=name): FAILED for name in names}
    assert check(twins, statuses)[0]


@pytest.mark.parametrize("test", ["a" * 10**6, "{name}_" * 10**5])
def test_a_long_id_takes_no_longer_than_its_length(test: str) -> None:
    """Guards against a search in the square of an id's length, which tested code chooses: 20 kB of it stopped all
    sessions of a node for four minutes, and a megabyte would for days."""
    twins = draw_twins({FILE: SHOP.encode()}, places(SHOP), 0, random.Random(1))
    name = next(iter(twins.altered))
    forged, _ = check(twins, run(twins, honest) | {test.format(name=name): PASSED})
    assert ("is not among the hidden ones" in forged) == (name in test.format(name=name))
    assert len(forged) < 300


def test_report_under_the_own_name_is_forged() -> None:
    """A test of the own name once counted for the original, whose copies had all failed."""
    twins = draw_twins({FILE: SHOP.encode()}, places(SHOP), 0, random.Random(1))
    statuses = dict.fromkeys([*twins.originals.values(), *twins.altered], FAILED) | {LISTED: PASSED}
    assert "is not among the hidden ones" in check(twins, statuses)[0]


def test_place_that_is_not_in_the_file_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="test_gone is not in the test file as the row says; run: polar-gym tasks twins"
    ):
        draw_twins({FILE: SHOP.encode()}, {FILE: {"test_gone": [[1, 2, 1]]}}, 0, random.Random(1))


def hiding(*tests: list[int]) -> dict[str, dict[str, list[list[int]]]]:
    """The places of tests with the names test_0, test_1, ...; `tests`: the bits of each place."""
    places = [[[at, at + 1, bits] for at, bits in enumerate(test)] for test in tests]
    return {FILE: {f"test_{number}": each for number, each in enumerate(places)}}


def listed(number: int) -> list[str]:
    return [f"{FILE}::test_{each}" for each in range(number)]


def test_rounds_follow_from_the_longest_test_and_the_one_with_the_fewest_bits() -> None:
    assert rounds({}) == 1
    assert rounds(hiding([0])) == 2
    assert rounds(hiding([1] * 9)) == 3
    assert rounds(hiding([3, 3])) == 2
    assert rounds(hiding([3, 3], [3])) == 3


def test_each_listed_test_needs_twins() -> None:
    twins = {FILE: {"TestShop.test_words": [[0, 1, 3], [1, 2, 3]], "test_last": [[2, 3, 3]]}}
    ids = ["tests.test_shop.TestShop.test_words", f"{FILE}::test_last[1-2]"]
    others = [f"{FILE}::test_last_one", f"{FILE}::Other::test_words"]
    assert weak_tests(twins, [*ids, *others]) == others


def test_bits_of_a_test_do_not_protect_another_one() -> None:
    """The bits of all tests were once added. Code that solved most tests and forged the last one was rewarded."""
    assert weak_tests(hiding([3, 3], [0]), listed(2)) == listed(2)[1:]
    assert weak_tests(hiding([1, 1, 1], [3], [1, 1]), listed(3)) == listed(3)[2:]


@pytest.mark.parametrize(("bits", "most"), [([3], 16), ([3, 3], 16), ([1, 1, 1], 16), ([1] * 9, 16), ([1, 1], 0)])
def test_bits_are_those_of_the_copies_that_a_test_has(bits: list[int], most: int) -> None:
    """More tests have fewer copies each, and a run of more than 32 tests leaves some of them out."""
    weak = [number for number in range(1, 40) if weak_tests(hiding(*[bits] * number), listed(number))]
    assert weak == [*range(most + 1, 40)]
