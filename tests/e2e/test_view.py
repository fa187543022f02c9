"""`polar-gym view` in a real browser: filters, links, keys, search, side by side, annotations, hostile content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from polar_gym.cli import main
from polar_gym.schema import Episode
from tests.support.browser import Browser, address, browsing
from tests.support.made_runs import made_run, made_session, write_run

TASKS, SAMPLES = 3, 6
TABS = ("conversation", "tokens", "forks", "diff", "tests", "output", "facts")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as made:
        yield made


@pytest.fixture(autouse=True)
def no_errors(browser: Browser) -> Iterator[None]:
    yield
    assert browser.errors() == []


def write(directory: Path, episodes: Iterator[Episode], *options: str) -> Path:
    """The page of these episodes, as the command writes it."""
    file, page = write_run(directory / "run.jsonl", episodes), directory / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["view", str(file), "--out", str(page), *options])
    assert ended.value.code == 0
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    return write(directory, made_run(TASKS, SAMPLES, directory), "--builder", "per_request")


def answers(browser: Browser, question: str) -> dict[str, int]:
    """The answers that a card of the run page shows, with their numbers."""
    script = """return [...document.querySelectorAll(`[data-question=${arguments[0]}] .answer`)]
        .map((each) => ['.name', '.n'].map((part) => each.querySelector(part).innerText))"""
    return {name: int(number.replace(",", "")) for name, number in browser.run(script, question)}


def test_every_chart_filters_every_other(browser: Browser, page: Path) -> None:
    browser.open(address(page))
    assert browser.text("#shown") == f"{TASKS * SAMPLES} sessions", "variants by other builders are not counted"
    before = answers(browser, "end")
    browser.click("[data-question=break] .answer", "history")
    browser.wait("return document.querySelector('#shown').innerText.includes('of')")
    assert browser.text("#shown") == f"{TASKS} of {TASKS * SAMPLES} sessions"
    assert sum(answers(browser, "end").values()) == TASKS
    assert browser.run("return document.activeElement.dataset.focus") == "break:history", "keys go on from there"
    assert answers(browser, "break") == {"history": TASKS, "engine": TASKS, "off": TASKS}
    browser.click(".chip")
    browser.wait("return !document.querySelector('#shown').innerText.includes('of')")
    assert answers(browser, "end") == before


def test_figures_of_a_run_agree_with_each_other(browser: Browser, tmp_path: Path) -> None:
    """Guards against a task that counts a masked sample as a failure, and a truncated success that is no success."""
    sessions = [made_session(task, sample, None) for task in (3, 4) for sample in (0, 1, 4, 5)]
    scored = [each for each in sessions if each.reward is not None]
    good = sum(each.reward == 1 for each in scored)
    browser.open(address(write(tmp_path, iter(sessions))))
    assert f"{good} passed" in browser.text(".head").replace("\n", " ")
    assert sum(n for name, n in answers(browser, "end").items() if name.startswith("passed")) == good
    for task, rate in (("intervals-0003", "33 %"), ("intervals-0004", "100 %")):
        assert [rate in row for row in browser.text("table.tasks").split("\n") if task in row] == [True]
    assert "2 groups, the worst first; 1 without variance" in browser.text("main")


def test_groups_of_two_files_are_compared_apart(browser: Browser, tmp_path: Path) -> None:
    """Guards against a task without a signal that seemed to have one: all failed in one file, and none in the other."""
    files = []
    for reward, samples in ((0.0, (0, 5)), (1.0, (1, 2))):
        sessions = [made_session(3, sample, None) for sample in samples]
        sessions = [each.model_copy(update={"reward": reward, "evaluation": None}) for each in sessions]
        files.append(write_run(tmp_path / f"{reward}.jsonl", iter(sessions)))
    with pytest.raises(SystemExit) as ended:
        main(["view", *map(str, files), "--out", str(tmp_path / "page.html")])
    assert ended.value.code == 0
    browser.open(address(tmp_path / "page.html"))
    assert "2 groups, the worst first; 2 without variance" in browser.text("main")
    assert "no variance in 2 of 2" in browser.text("table.tasks")


def test_a_filter_a_call_and_a_token_have_addresses(browser: Browser, page: Path) -> None:
    browser.open(address(page, "#f.end=engine_error"))
    assert browser.text("#shown") == f"{TASKS} of {TASKS * SAMPLES} sessions"
    trace = made_session(0, 1, None).trajectory.traces[0]
    place = len(trace.prompt_ids) + trace.turns[1].start
    row = 1 + 1  # each session is followed by its variant
    browser.open(address(page, f"#e={row}&tab=tokens&call={trace.turns[1].call_id}"))
    assert f"position\n{place}\n" in browser.text(".detail")
    assert "call\n1, token 0 of" in browser.text(".detail")
    browser.wait("return document.querySelector('.tokens .marked')?.dataset.at === arguments[0]", str(place))
    browser.click(f".tokens [data-at='{place + 1}']")
    browser.wait("return location.hash.includes('token=')")
    assert browser.place().endswith(f"token={place + 1}")
    browser.open(address(page, f"#e={row}&call={trace.turns[1].call_id}"))
    assert browser.run("return document.querySelectorAll('.message.marked.assistant').length") == 1


def test_keys_lead_through_a_run(browser: Browser, page: Path) -> None:
    browser.open(address(page))
    for keys, place in (("j", "#e=0"), ("j", "#e=2"), ("k", "#e=0"), ("t", "#e=0&tab=tokens"), ("t", "#e=0")):
        browser.keys(keys)
        browser.wait("return location.hash === arguments[0] && document.body.dataset.ready === arguments[0]", place)
    browser.keys("?")
    assert "next failure" in browser.text("dialog")
    browser.keys("\ue00c")  # escape
    browser.wait("return !document.querySelector('dialog').open")
    browser.go("#f.end=engine_error")
    browser.keys("n")
    browser.wait("return document.querySelector('.flag.bad')?.innerText.includes('engine_error')")
    browser.keys("u")
    browser.wait("return document.querySelector('#shown')")


def test_search_finds_text_and_token_ids(browser: Browser, page: Path) -> None:
    browser.open(address(page))
    trace = made_session(2, 3, None).trajectory.traces[-1]
    ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()][-30:]
    for query, found in (("callers of", TASKS), (f"id:{','.join(map(str, ids))}", 1)):
        browser.keys("/")
        browser.wait("return document.activeElement.type === 'search'")
        browser.keys(f"{query}\n")
        browser.wait("return document.querySelector('dialog p').innerText.endsWith(' in 18 of 18 episodes')")
        assert browser.run("return document.querySelectorAll('.results li').length") == found
        browser.click(".results a")
        browser.wait("return location.hash.includes('e=') && !document.querySelector('dialog').open")


def test_forks_show_both_sides_and_the_tree_what_is_excluded(browser: Browser, page: Path) -> None:
    browser.open(address(page, "#e=2&tab=forks"))
    assert browser.text(".body").count("the first difference is at position") == 3
    sides = browser.run("return [...document.querySelectorAll('.around .marked')].map((each) => each.innerText)")
    assert sides[1::2] == [" otherwise"] * 3
    assert " otherwise" not in sides[::2]
    browser.go("#e=6&tab=forks")
    assert "(compaction) goes on from call 3, as trace 0 does" in browser.text(".body"), "a fork without a break"
    browser.go("#e=4")
    tree = browser.text("aside")
    assert "excluded: abandoned" in tree
    assert "subagent" in tree
    assert "excluded: kind:auxiliary" in tree


def test_an_episode_says_which_settings_of_the_repository_its_harness_took(browser: Browser, tmp_path: Path) -> None:
    """Guards against a page of an episode that was sampled with other settings than ours, and does not say so."""
    plain, changed = (made_session(0, sample, None) for sample in (0, 1))
    changed.artifacts.project_settings = [".env", ".mcp.json"]
    page = write(tmp_path, iter([plain, changed]))
    shown = []
    for place in ("#e=0", "#e=1"):
        browser.open(address(page, place))
        shown.append(browser.text("main"))
    assert ["settings of the repository .env, .mcp.json" in text for text in shown] == [False, True]


def test_two_samples_and_two_builders_side_by_side(browser: Browser, page: Path) -> None:
    browser.open(address(page, "#e=0&with=2"))
    one, two = (made_session(0, sample, None).trajectory.traces[0] for sample in (0, 1))
    whole = [[*trace.prompt_ids.tolist(), *trace.response_ids.tolist()] for trace in (one, two)]
    parting = next(at for at, (this, that) in enumerate(zip(*whole, strict=False)) if this != that)
    assert f"The tokens part at position {parting}" in browser.text("#parting")
    browser.go("#e=2&with=3")
    shown = browser.text("main")
    assert "4 traces" in shown
    assert "7 traces" in shown


def test_a_branch_beside_the_session_that_it_is_branched_from(browser: Browser, tmp_path: Path) -> None:
    page = write(tmp_path, (made_session(0, sample, tmp_path) for sample in (0, 6)))
    branch = made_session(0, 6, None).trajectory.traces[0]
    browser.open(address(page, "#e=1"))
    assert browser.text("aside").count("from s0000x00") == 2, "two calls come from the record"
    assert "#0, which this is branched from" in browser.text("select")
    browser.click("a.flag", "branched from s0000x00")
    browser.wait("return document.querySelector('#parting')")
    assert f"s0000x00, after {branch.shared_prefix} tokens" in browser.text("main")
    parting = int(browser.text("#parting h2").split()[-1].replace(",", ""))
    assert parting >= branch.shared_prefix > 0


def test_values_of_a_trainer_are_laid_over_the_tokens(browser: Browser, tmp_path: Path) -> None:
    trace = made_session(0, 0, None).trajectory.traces[0]
    values = [None] * len(trace.prompt_ids) + [index / 100 for index in range(len(trace.response_ids))]
    notes = tmp_path / "notes.jsonl"
    notes.write_bytes(orjson.dumps({"session_id": trace.session_id, "trace_id": trace.trace_id, "ratio": values}))
    page = write(tmp_path, made_run(1, 1, tmp_path), "--annotations", str(notes))
    browser.open(address(page, f"#e=0&tab=tokens&colour=ratio&token={len(trace.prompt_ids) + 7}"))
    assert "ratio\n0.070000" in browser.text(".detail")
    assert browser.run("return document.querySelectorAll('.tokens .h7').length") > 0
    assert browser.text(".legend").split() == ["0.00", f"{values[-1]:.3g}"]


HOSTILE = (
    "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'><svg onload='window.hit = 3'>"
    "<a href='javascript:window.hit=4'>link</a><!--<style>*{display:none}</style>"
    "\x1b[31mred\x1b[0m \u202eesrever\u202c ]]>"
)


def test_nothing_that_an_agent_says_is_run_or_hides(browser: Browser, tmp_path: Path) -> None:
    def hostile(episode: Episode) -> Episode:
        session, evaluation = episode.session, episode.evaluation
        assert evaluation is not None
        session.session_id = f"{HOSTILE} {session.session_id}"
        session.task_id = session.harness = session.node = HOSTILE
        evaluation.detail = evaluation.log = HOSTILE
        evaluation.tests = {HOSTILE: HOSTILE}
        evaluation.components = {HOSTILE: 1.0}
        for name in ("final_message", "diff", "stdout", "stderr"):
            setattr(episode.artifacts, name, HOSTILE)
        episode.artifacts.not_carried = [HOSTILE]
        episode.engine.model = episode.request.instruction = HOSTILE
        episode.engine.tokenizer = None
        episode.request.metadata = {HOSTILE: HOSTILE}
        episode.trajectory.fidelity.excluded = {HOSTILE: 1, "__proto__": 2}
        for broken in episode.trajectory.fidelity.breaks:
            broken.cause = HOSTILE
        for attempt, name in zip(episode.trajectory.tool_attempts, [HOSTILE, "constructor"] * 9, strict=False):
            attempt.name = name
        for trace in episode.trajectory.traces:
            trace.trace_id = HOSTILE
            for version in trace.weight_versions:
                version.version = HOSTILE
            for message in trace.messages:
                message.update(role=HOSTILE if message["role"] == "tool" else message["role"], content=HOSTILE)
                for made in message.get("tool_calls") or []:
                    made["function"] = {"name": HOSTILE, "arguments": HOSTILE}
        return episode

    page = write(tmp_path, (hostile(made_session(task, 1, None)) for task in range(2)))
    assert b"window.hit" not in page.read_bytes(), "the data is compressed"
    browser.open(address(page))
    for place in (
        "",
        *(f"#e=0&tab={tab}" for tab in TABS),
        "#e=0&with=1",
    ):
        browser.go(place)
        assert "window.hit = 1" in browser.text("body"), place
        assert browser.run("return window.hit ?? null") is None, place
        for selector in ("img", "svg[onload]", "a[href^='javascript']", "main script", "main style"):
            assert browser.run("return document.querySelectorAll(arguments[0]).length", selector) == 0, (
                place,
                selector,
            )
        shown = browser.text("main")
        assert "\u202e" not in shown, place
        assert "U+202E" in shown, place
        assert "\\x1b[31mred" in shown, f"{place}: escape is shown by its name"
    browser.go("")
    assert answers(browser, "tool")["constructor"] == 2 * 3, "a name of JavaScript's own is counted like others"
    outside = browser.run(
        "return [...document.querySelectorAll('a[href]')].filter((a) => !a.getAttribute('href').startsWith('#')).length"
    )
    assert outside == 0, "no link leaves the page"
