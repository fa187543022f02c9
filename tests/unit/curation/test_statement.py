"""The instruction of a task that was made from a commit."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from polar_gym.curation import CurationError
from polar_gym.curation.releases import Comparison
from polar_gym.curation.statement import Writer, cleaned, read_issues, without_solution, write_statement
from polar_gym.errors import ConfigError
from tests.support.judge import Whole, judging

LINE = "return the_list[index + 1 :] if index else []"
PATCH = f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-old\n+    {LINE}\n"
FAILING = {"tests/test_a.py::test_the_last_item": "IndexError: list index out of range"}


async def statement(
    tmp_path: Path, message: str, issues: Mapping[int, str] | None = None, writer: Writer | None = None
) -> tuple[str, str]:
    comparison = Comparison(base_commit="", patch=PATCH, test_patch="", test_modules=[], import_roots=[])
    return await write_statement(message, tmp_path, tmp_path, comparison, FAILING, issues or {}, writer)


def test_a_message_is_cleaned_of_all_that_is_not_about_the_behaviour() -> None:
    message = (
        "Merge pull request #12 from someone/branch\n\nfix: `|=` does not work as expected (#331)\n\n"
        "It raised an error, as @someone saw in https://example.org/1.\n\nFixes #331\n"
        "Signed-off-by: A <a@example.org>\nCo-authored-by: B <b@example.org>\n(cherry picked from commit 1234)\n"
    )
    assert cleaned(message) == "fix: `|=` does not work as expected\n\nIt raised an error, as  saw in"


async def test_a_message_that_says_too_little_gets_the_failing_tests(tmp_path: Path) -> None:
    text, source = await statement(tmp_path, "Fix it\n")
    assert source == "commit message"
    assert text.startswith("Fix it\n\nThese behaviours do not work")
    assert "- the last item (a): today `IndexError: list index out of range`" in text
    (title, *_), _ = (await statement(tmp_path, "Merge branch 'main'\n"))[0].splitlines(), None
    assert title == "the last item (a)"


async def test_lines_of_the_solution_are_left_out(tmp_path: Path) -> None:
    message = (
        f"Return the rest of the list after the first match\n\nNow it is\n    {LINE}\nas it should have been before.\n"
    )
    text, _ = await statement(tmp_path, message)
    assert LINE not in text
    assert "as it should have been before." in text
    assert without_solution("nothing of it", PATCH) == "nothing of it"


async def test_an_issue_that_the_message_names_is_the_instruction(tmp_path: Path) -> None:
    file = tmp_path / "issues.jsonl"
    file.write_text('{"number": 7, "title": "Lists lose an item", "body": "See [1, 2]."}\n')
    text, source = await statement(tmp_path, "Mend the lists (GH-7)", read_issues(file))
    assert (text, source) == ("Lists lose an item\n\nSee [1, 2].\n", "issue")
    assert (await statement(tmp_path, "Mend the lists, in #8, for all and ever", read_issues(file)))[
        1
    ] == "commit message"


@pytest.mark.parametrize("text", ['{"number": "7", "title": "a"}\n', '{"number": 7}\n', "no JSON\n"])
def test_a_broken_file_of_issues_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "issues.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"issues\.jsonl:1: "):
        read_issues(file)
    with pytest.raises(ConfigError, match="cannot read the issues"):
        read_issues(tmp_path / "none.jsonl")


async def test_a_model_may_write_the_instruction(tmp_path: Path) -> None:
    async with judging("Lists lose an item\n\nThe last one.\n") as server:
        text, source = await statement(tmp_path, "Mend lists", writer=Writer(url=server.url, model="m", key="k"))
        assert (text, source) == ("Lists lose an item\n\nThe last one.\n", "model")
        (asked,) = server.asked
        assert asked["model"] == "m"
        assert "Mend lists" in asked["messages"][1]["content"]
        assert LINE in asked["messages"][1]["content"]
        assert server.headers == ["Bearer k"]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (f"Lists\n\nWrite {LINE}", "tells a line of the solution"),
        ("  ", "its answer is empty"),
        (Whole({"error": {"message": "no such model"}}, 404), "no such model"),
        (Whole({"choices": []}), "wrote no issue"),
    ],
    ids=["solution", "empty", "refused", "malformed"],
)
async def test_a_model_that_tells_the_solution_or_nothing_is_refused(
    tmp_path: Path, answer: object, problem: str
) -> None:
    async with judging(answer) as server:
        with pytest.raises(CurationError, match=problem):
            await statement(tmp_path, "Mend lists", writer=Writer(url=server.url, model="m"))
