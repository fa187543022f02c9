"""Show how fast a browser opens large runs: `make show-view`.

Pages of 2,000 made-up episodes with 2 and with 10 million tokens are opened, and one of a single episode with 200,000
tokens. The tokens of their first episode are scrolled by 100 pixels a frame. Ids are random, and therefore compress
worse than real ones. Then a rollout server has 1,000 running sessions on 50 nodes that run nothing, and its live page
is followed: what that costs the server and the browser. `--pictures DIRECTORY` takes the pictures of the documentation
instead, of a smaller run with forks, sub-agents, compactions and failures, and of a rollout server that works.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.table import Table

from polar_gym.builders import build_trajectory
from polar_gym.client import RolloutClient
from polar_gym.console import make_console
from polar_gym.episodes.reading import read_calls, read_episodes
from polar_gym.schema import BuilderSpec, Episode, ModelCall
from polar_gym.view.blocks import Encoder
from polar_gym.view.page import head, write_page
from tests.learning.proofs import PROOFS
from tests.lifecycle.server_process import server_process
from tests.lifecycle.service_fixtures import SERVICE_KEY
from tests.show.result import Result, make_parser, parse
from tests.support.browser import Browser, address, browsing
from tests.support.calls import make_call
from tests.support.live_page import live_page
from tests.support.made_runs import SAID, made_run, made_session, write_run
from tests.support.sessions import asking, task

QUICKLY, SMALL, SILENT, LITTLE, FREE, CALM = LAWS = (
    "a page of 2 million tokens opens in less than 2 s, and one of 10 million in less than 6 s",
    "the page's code has at most 150 kB, compressed",
    "the page's console says nothing",
    "a live page of 1,000 sessions, each with a call in ten seconds, gets at most 200 kB a second",
    "ten live pages of 1,000 sessions cost the server at most 20 % of a core more than none",
    "a live page of 1,000 sessions, of which it lists 20, makes at most 200 elements a second",
)
LIMITS = {2.0: 2.0, 10.0: 6.0}
"""Millions of tokens -> seconds."""
VOCABULARY = 4096
INSTRUCTION = "Intervals that touch must be joined, and a gap of one must stay open."
CALLS = 5

PICTURES = {
    "run": ("", 1280, 1000, False),
    "episode": ("#e=2", 1280, 760, False),
    "tokens": ("#e=3&tab=tokens&token=420", 1280, 620, True),
    "forks": ("#e=1&tab=forks", 1280, 620, False),
    "side_by_side": ("#e=32&with=33", 1280, 1000, True),
}
"""Name -> place, width, height, and whether the colours are dark."""

FRAMES = """const done = arguments[0], times = [];
const step = (now) => {
  times.push(now);
  scrollBy(0, 100);
  times.length < 121 ? requestAnimationFrame(step) : done(times);
};
requestAnimationFrame(step);"""


CLICK = """const done = arguments[0], begun = performance.now();
document.querySelector('[data-question=end] .answer').click();
const look = () => location.hash && document.body.dataset.ready === location.hash
  ? requestAnimationFrame((now) => done(now - begun)) : requestAnimationFrame(look);
look();"""
"""Clicks a bar of a chart, and tells the milliseconds until the page that it leaves is drawn."""


def large_run(episodes: int, tokens: int) -> Iterator[Episode]:
    """Yield episodes with this many tokens in all, in one trace each."""
    draw = np.random.default_rng(0)
    size = tokens // episodes // (2 * CALLS)
    for number in range(episodes):
        calls: list[ModelCall] = []
        known: list[int] = []
        for index in range(CALLS):
            prompt = [*known, *draw.integers(0, VOCABULARY, size).tolist()]
            sampled = draw.integers(0, VOCABULARY, size).tolist()
            messages = [
                {"role": "user", "content": SAID * (size // 20)},
                {"role": "tool", "content": str(prompt[-size:])},
            ]
            logprobs = -draw.exponential(0.5, size).astype(np.float32)
            calls.append(make_call(index, prompt, sampled, messages=messages).model_copy(update={"logprobs": logprobs}))
            known = [*prompt, *sampled]
        made = made_session(number // 8, number % 8, None, turns=1, length=1)
        trajectory = build_trajectory(calls, BuilderSpec(name="prefix_merging"))
        yield made.model_copy(update={"trajectory": trajectory})


def measured(result: Result, browser: Browser, episodes: int, millions: float) -> dict[str, float]:
    """Return the figures of one size."""
    with tempfile.TemporaryDirectory() as directory:
        file = write_run(Path(directory) / "run.jsonl", large_run(episodes, int(millions * 1e6)))
        begun = time.perf_counter()
        read = list(read_episodes(file))
        parsed = time.perf_counter() - begun
        encoder, page = Encoder(), Path(directory) / "page.html"
        begun = time.perf_counter()
        with page.open("wb") as out:
            write_page((block for episode in read for block in encoder.blocks("run", episode, [])), out)
        encoded = time.perf_counter() - begun
        browser.open(address(page))  # the file is in memory afterwards, as one that was just written
        opened: list[tuple[float, float]] = []
        for _ in range(3):
            browser.open(address(page))
            times = "return performance.getEntriesByName(arguments[0])[0]?.startTime / 1000"
            paint, shown = (browser.wait(times, name) for name in ("first-contentful-paint", "shown"))
            opened.append((shown, paint))
        shown, paint = sorted(opened)[1]
        answered = browser.driver.execute_async_script(CLICK)
        heap = browser.run("return performance.memory.usedJSHeapSize / 1e6")
        whole = browser.memory() / 1e6
        browser.go("#e=0&tab=tokens")
        frames = np.diff(browser.driver.execute_async_script(FRAMES))
        limit = LIMITS.get(millions)
        if limit is not None:
            result.check(QUICKLY, [f"{millions} million tokens: {shown:.1f} s"] if shown >= limit else [])
        return {
            "episodes": episodes,
            "million tokens": millions,
            "JSON MB": round(file.stat().st_size / 1e6, 1),
            "page MB": round(page.stat().st_size / 1e6, 1),
            "read by Python s": round(parsed, 2),
            "page made s": round(encoded, 2),
            "first paint s": round(paint, 2),
            "shown s": round(shown, 2),
            "a click filters, s": round(answered / 1000, 2),
            "Python / shown": round(parsed / shown, 1),
            "heap MB": round(heap, 1),
            "all of Chromium MB": round(whole),
            "frame ms, 95 %": round(float(statistics.quantiles(frames, n=20)[-1]), 1),
        }


def take_pictures(directory: Path) -> None:
    """Take the pictures of the documentation."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        page = place / "page.html"
        encoder = Encoder()
        with page.open("wb") as out:
            write_page(
                (b for each in made_run(12, 16, place) for b in encoder.blocks("run.jsonl", each, read_calls(each))),
                out,
            )
        directory.mkdir(parents=True, exist_ok=True)
        for name, (where, width, height, dark) in PICTURES.items():
            with browsing(width, height, dark=dark) as browser:
                browser.open(address(page, where))
                browser.driver.execute_async_script("setTimeout(arguments[0], 500)")  # canvases and scrolling
                browser.driver.save_screenshot(str(directory / f"{name}.png"))


async def take_picture_of_server(file: Path) -> None:
    """Take the picture of a server with sessions that ended, that wait and that run, and with two learning curves."""
    with tempfile.TemporaryDirectory() as made:
        curves = [Path(made) / name for name in ("codex-trail-0", "codex-trail-1")]
        for seed, curve in enumerate(curves):
            curve.mkdir()
            (curve / "plan.json").write_text(json.dumps({"plan": {"seed": seed}}))
            shutil.copy(PROOFS / f"{curve.name}.jsonl", curve / "steps.jsonl")
        settings = ("runtime=bubblewrap", f"engine.scripts=[{{commands: [], final_message: {SAID[:56]}}}]")
        learning = f"learning={','.join(map(str, curves))}"
        async with (
            server_process(Path(made) / "state", *settings, learning) as server,
            RolloutClient(server.url, SERVICE_KEY) as client,
        ):
            ended = await client.submit(task(task_id="intervals-0001", num_samples=8))
            await client.wait(ended.task_id)
            works = asking("ask(); import time; time.sleep(600)")
            for name in ("intervals-0002", "durations-0001"):
                await client.submit(task(task_id=name, instruction=INSTRUCTION, num_samples=2, agent=works))
            with browsing(1280, 1240) as browser:
                browser.open(server.url)
                browser.wait("return document.activeElement.type === 'password'")
                browser.keys(f"{SERVICE_KEY}\n")
                words = "return document.querySelector('main')?.textContent.split(arguments[0]).length > 4"
                browser.wait(words, SAID[:56])
                browser.driver.save_screenshot(str(file))


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(
        "view", __doc__, quick="10 million tokens; figures of the live page are measured for 3 s instead of 10 s"
    )
    parser.add_argument("--pictures", type=Path, help="take the pictures of the documentation into this directory")
    options = parse(parser, argv)
    if options.pictures is not None:
        take_pictures(options.pictures)
        asyncio.run(take_picture_of_server(options.pictures / "server.png"))
        return 0
    result = Result("view", LAWS, options)
    size = len(zlib.compress(head(follows=False)))
    result.check(SMALL, [f"{size} bytes"] if size > 150_000 else [])
    with browsing() as browser:
        sizes = [(2000, 2.0), (1, 0.2), *([] if options.quick else [(2000, 10.0)])]
        rows = [measured(result, browser, *size) for size in sizes]
        result.check(SILENT, browser.errors())
    live = asyncio.run(live_page(50, 1000, 3 if options.quick else 10))
    result.check(LITTLE, _above(live, "kB a second", 200))
    paid = live["server's CPU with ten pages %"] - live["server's CPU without a page %"]
    result.check(FREE, [f"{paid:.1f} %"] if paid > 20 else [])
    result.check(CALM, _above(live, "elements made a second", 200))
    result.figures = {"code bytes": size, "pages": rows, "live page": live}
    table = Table(title="pages in Chromium, without a screen", title_justify="left")
    for heading in ("", *(f"{row['million tokens']} million" for row in rows)):
        table.add_column(heading, justify="right" if heading else "left")
    for name in rows[0]:
        table.add_row(name, *(str(row[name]) for row in rows))
    make_console().print(table)
    following = Table(title="the live page of a rollout server", title_justify="left", show_header=False)
    for name, value in live.items():
        following.add_row(name, str(value))
    make_console().print(following)
    return result.finish()


def _above(figures: dict[str, float], name: str, most: float) -> list[str]:
    return [f"{name}: {figures[name]}"] if figures[name] > most else []


if __name__ == "__main__":
    sys.exit(main())
