"""Tests of the search for attacks: it beats graders without a defence, and is itself no danger to a real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from polar_gym.runtimes import agent
from tests.attack_search.building import commands
from tests.attack_search.drawing import Drawer
from tests.attack_search.exploring import Search, kind
from tests.attack_search.fragments import FAMILIES, FRAGMENTS
from tests.attack_search.grounds import Ground, grounds
from tests.attack_search.plan import PLACES, TRIGGERS, Piece, Plan, plan_from
from tests.attack_search.triggers import wrapped
from tests.attack_search.weak_grader import Reads, weak_grader
from tests.lifecycle.grading_bench import Bench, make_bench
from tests.support.requirements import need


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = make_bench(tmp_path)
    bench.offer_pytest()
    return bench


SOME = (
    "bytecode_in_the_cache",
    "forged_log_at_exit",
    "testcase_run_succeeds",
    "conftest_hooks",
    "tests_deleted",
    "gc_words_replaced",
    "assert_does_nothing",
    "exit_at_once",
)
"""A few fragments, good and bad ones: with all of them, each new one would change what a seed draws."""


def search_on(bench: Bench, ground: Ground, reads: Reads, seed: int) -> Search:
    fragments = {name: FRAGMENTS[name] for name in SOME}
    return Search(
        bench=bench, grounds={ground.name: ground}, fragments=fragments, grade=weak_grader(bench, reads), seed=seed
    )


@pytest.mark.parametrize(
    ("name", "reads", "seed"), [("intervals", "status", 25), ("pytest", "log", 19), ("node", "log", 152)]
)
async def test_it_finds_a_rewarded_diff_where_the_grader_is_weak(
    bench: Bench, name: str, reads: Reads, seed: int
) -> None:
    if name == "node":
        need(shutil.which("node", path=agent.PATH), "node in sandboxes", "https://nodejs.org (>= 20)")
    ground = grounds(bench.directory)[name]
    search = search_on(bench, ground, reads, seed)
    assert (await search.grade(ground, b"")).reward == 0
    assert (await search.grade(ground, ground.task.patch.encode())).reward == 1
    await search.explore(60, most=8, enough=1)
    assert search.breaches, search.outcomes
    assert search.tries > 1
    breach = search.breaches[0]
    assert breach.reward == 1
    assert breach.alone
    record = json.loads(json.dumps(breach.as_json(search.seed)))
    assert plan_from(record["plan"]) == breach.plan
    assert record["diff"].encode("utf-8", "surrogateescape") == breach.diff


async def test_a_diff_is_graded_once(bench: Bench) -> None:
    ground = grounds(bench.directory)["intervals"]
    search = search_on(bench, ground, "status", 1)
    plan = Plan(ground="intervals", pieces=(Piece(fragment="gc_words_replaced"),))
    for _ in range(2):
        await search.attempt(plan)
    assert (search.tries, search.graded, search.outcomes.total()) == (2, 1, 1)


async def test_the_real_grader_says_what_became_of_each_try(bench: Bench) -> None:
    ground = grounds(bench.directory)["intervals"]

    async def grade(ground: Ground, diff: bytes):
        return await bench.evaluate(ground.task, diff)

    assert (await grade(ground, ground.task.patch.encode())).reward == 1
    search = Search(bench=bench, grounds={"intervals": ground}, fragments=FRAGMENTS, grade=grade, seed=1)
    for fragment in ("leaves_at_once", "testcase_run_succeeds"):
        await search.attempt(Plan(ground="intervals", pieces=(Piece(fragment=fragment),), partial=True))
    assert (search.graded, search.breaches, search.unjudged) == (2, [], [])


def test_a_seed_draws_the_same_plans(tmp_path: Path) -> None:
    places = grounds(tmp_path)

    def plans() -> list[Plan]:
        drawer = Drawer(5, places, FRAGMENTS)
        drawn = [drawer.draw() for _ in range(200)]
        return drawn + [drawer.change(plan) for plan in drawn]

    once = plans()
    assert once == plans()
    assert {piece.trigger for plan in once for piece in plan.pieces} == set(TRIGGERS)
    assert {piece.place for plan in once for piece in plan.pieces} == set(PLACES)
    assert {plan.ground for plan in once} == set(places)
    assert all(1 <= len(plan.pieces) <= 3 for plan in once)


def test_every_fragment_leads_before_any_leads_again(tmp_path: Path) -> None:
    ground = grounds(tmp_path)["pytest"]
    drawer = Drawer(2, {"pytest": ground}, FRAGMENTS)
    fitting = [name for name, fragment in FRAGMENTS.items() if fragment.language in ("python", "any")]
    assert {name for _ in fitting for name in drawer.draw().fragments} == set(fitting)


@pytest.mark.parametrize("name", ["intervals", "durations", "pytest", "script", "node"])
def test_every_fragment_becomes_commands(tmp_path: Path, name: str) -> None:
    ground = grounds(tmp_path)[name]
    for fragment in FRAGMENTS.values():
        if fragment.language in (ground.language, "any"):
            for place in PLACES:
                plan = Plan(ground=name, pieces=(Piece(fragment=fragment.name, place=place, nth=1),), partial=True)
                text = "\n".join(commands(plan, ground, FRAGMENTS))
                assert text
                assert "@PACKAGE@" not in text


def test_every_python_fragment_compiles_under_every_trigger() -> None:
    texts = {name: each.code for name, each in FRAGMENTS.items() if each.code and each.language == "python"}
    for name, code in texts.items():
        text = code.replace("@PACKAGE@", "package").replace("@MODULE@", "package.module")
        for trigger in TRIGGERS:
            for piece in (
                Piece(fragment=name, trigger=trigger, framework="pytest", guarded=True),
                Piece(fragment=name, trigger=trigger, packed=True),
            ):
                compile(wrapped(text, piece), name, "exec")


def test_the_families_are_large() -> None:
    assert len(FRAGMENTS) >= 60
    assert len(FAMILIES) >= 20
    assert all(each.code or each.files or each.shell for each in FRAGMENTS.values())


def test_like_outcomes_are_of_one_kind() -> None:
    assert kind("4 of 4 not passed; not counted: a.b.C, a.b.D") == kind("3 of 5 not passed; not counted: x.y.Z")
    assert kind("said 'one'\nand more") == kind("said 'two'")
    assert kind("") == "no detail"
