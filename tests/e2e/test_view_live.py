"""The page of a rollout server in a real browser: the key, nodes, tasks, the words of a running session, curves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from polar_gym.client import RolloutClient
from polar_gym.http.keys import Keys
from polar_gym.protocol import Transcript
from tests.lifecycle.peer_node import PeerNode, make_request
from tests.lifecycle.server_process import server_process
from tests.lifecycle.service_fixtures import NODE_KEY, SERVICE_KEY, rollout_server
from tests.support.browser import Browser, browsing
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, task

HOSTILE = "<img src=x onerror=window.hit=1>"


def write_run(directory: Path, steps: int) -> Path:
    """Write the files of `polar-gym learn` that the page reads; the last line is still being written."""
    directory.mkdir(exist_ok=True)
    (directory / "plan.json").write_text(json.dumps({"plan": {"seed": 7}}))
    lines: list[object] = [{"cold_start": True}, {"evaluated": 0, "greedy": False, "reward": 0.25}]
    lines += [
        {"step": step, "reward": step / 10, "sampled": 640, "sessions": 64, "kl": 0.01, "ratio": 1.01}
        for step in range(1, steps + 1)
    ]
    (directory / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": ')
    return directory


def shows(browser: Browser, text: str) -> None:
    browser.wait("return document.querySelector('main')?.textContent.includes(arguments[0])", text)


async def test_the_page_tells_what_the_server_does(tmp_path: Path) -> None:
    need_bubblewrap()
    run = write_run(tmp_path / "a-run", 3)
    async with (
        server_process(
            tmp_path / "state",
            "engine.scripts=[{commands: [], final_message: A word of the policy}]",
            "runtime=bubblewrap",
            f"learning={run}",
        ) as server,
        RolloutClient(server.url, SERVICE_KEY) as client,
    ):
        await client.submit(
            task(task_id="watched", instruction=HOSTILE, agent=asking("ask(); import time; time.sleep(600)"))
        )
        with browsing() as browser:
            browser.open(server.url)
            for key in ("wrong-key-0123456789", SERVICE_KEY):
                browser.wait("return document.activeElement.type === 'password'")
                browser.keys(f"{key}\n")
                if key != SERVICE_KEY:
                    browser.wait(
                        "return document.querySelector('.note-bar').innerText === 'the server refused this key'"
                    )
            for text in (
                "watched",
                "local",
                "1 task live",
                "A word of the policy",
                "onerror=window.hit=1",
                "a-run, seed 7",
                "over 3 steps",
            ):
                shows(browser, text)
            assert browser.run("return document.querySelectorAll('img').length + (window.hit ?? 0)") == 0
            assert browser.run("return document.querySelectorAll('svg.curve polyline').length") == 5
            asked = browser.run("return performance.getEntries().map((each) => each.name).join(' ') + location.href")
            assert SERVICE_KEY not in asked
            refused = [each for each in browser.errors() if "401" not in each]
            assert refused == []
            write_run(run, 9)
            shows(browser, "over 9 steps")
            browser.driver.refresh()
            shows(browser, "watched")
            await client.cancel("watched")
            shows(browser, "1 cancelled")
            assert browser.errors() == []
            browser.driver.switch_to.new_window("tab")
            browser.open(server.url)
            assert browser.run("return document.body.dataset.ready") == "key", "the key is the first tab's only"


async def test_changes_leave_what_a_reader_does(tmp_path: Path) -> None:
    """Guards against a page that is drawn anew with each state: the reader's list, filter and focus were lost."""
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY, run=32) as node:
        await client.submit(make_request("many", num_samples=24))
        await client.submit(make_request("few", num_samples=2))
        orders = await node.take(26)

        def say(words: str) -> None:
            node.transcripts = [
                Transcript(session_id=order.session_id, attempt=0, calls=1, lines=[("assistant", f"{words} {place}.")])
                for place, order in enumerate(orders)
            ]

        def look(browser: Browser) -> None:
            browser.open(client.url)
            browser.wait("return document.activeElement.type === 'password'")
            browser.keys(f"{SERVICE_KEY}\n")
            shows(browser, "said once")
            browser.click(".more", "6 more")
            browser.run("document.querySelectorAll('.live td button')[2].focus()")
            browser.keys("\n")
            sessions = "return [...document.querySelectorAll('.session')].length"
            assert browser.run(sessions) == 24
            say("said twice")
            shows(browser, "said twice")
            assert browser.run(sessions) == 24
            assert browser.run("return document.activeElement.innerText") == "many"
            browser.run("const field = document.querySelector('input'); field.value = 'few'; field.focus()")
            browser.keys(" TWICE")
            assert browser.run(sessions) == 2
            browser.keys(" never")
            shows(browser, "0 of 26")
            browser.run("document.querySelector('input').select()")
            browser.keys("twice 25.")
            assert browser.run(sessions) == 1
            say("said at last")
            shows(browser, "0 of 26")
            assert [each for each in browser.errors() if "401" not in each] == []

        say("said once")
        await node.beat()
        with browsing() as browser:
            await asyncio.to_thread(look, browser)


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}])
async def test_without_a_key_other_pages_are_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    async with rollout_server(tmp_path, Keys()) as (_, client), aiohttp.ClientSession() as http:
        async with http.get(f"{client.url}/v1/live", headers=headers) as response:
            assert response.status == 403
        async with http.get(f"{client.url}/v1/live") as response:
            assert (await response.json(content_type=None))["nodes"] == {}
