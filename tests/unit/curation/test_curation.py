"""Making tasks out of two releases: what changed, what the instruction says, and what comes from the index."""

import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from polar_gym.curation import CurationError
from polar_gym.curation.declared import requirements
from polar_gym.curation.issue import changelog_entries, interface, phrase, write_issue
from polar_gym.curation.making import UNSTABLE, sort_tests, stable
from polar_gym.curation.pypi import fetch_sdist, unpack
from polar_gym.curation.releases import compare, is_test


def tree(root: Path, **files: str) -> Path:
    """Files by path, `__` for a slash and `_DOT_` for a dot: `src__a_DOT_py`."""
    root.mkdir(exist_ok=True)
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".").replace("_INIT", "__init__")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


OLD = {
    "thing___INIT_DOT_py": "VERSION = 1\n",
    "thing__gone_DOT_py": "x = 1\n",
    "tests__test_thing_DOT_py": "def test_old(): pass\n",
    "tests__data_DOT_txt": "old\n",
    "README_DOT_md": "old\n",
    "PKG-INFO": "Name: thing\nVersion: 1\n",
}
NEW = {
    "thing___INIT_DOT_py": "VERSION = 2\n",
    "thing__more_DOT_py": "y = 1\n",
    "tests__test_thing_DOT_py": "def test_new(): pass\n",
    "tests__data_DOT_txt": "new\n",
    "README_DOT_md": "new\n",
    "PKG-INFO": "Name: thing\nVersion: 2\n",
}


# What changed ---------------------------------------------------------------------------------------------------------


def test_sources_and_tests_are_told_apart_and_the_rest_is_in_neither(tmp_path):
    found = compare(tree(tmp_path / "old", **OLD), tree(tmp_path / "new", **NEW))
    changed = [line.split(" b/")[1] for line in found.patch.splitlines() if line.startswith("diff --git")]
    assert changed == ["thing/__init__.py", "thing/gone.py", "thing/more.py"]
    hidden = [line.split(" b/")[1] for line in found.test_patch.splitlines() if line.startswith("diff --git")]
    assert hidden == ["tests/data.txt", "tests/test_thing.py"]
    assert found.test_modules == ["tests/test_thing.py"]
    assert found.import_roots == ["."]
    assert "README" not in found.patch + found.test_patch


def test_a_source_layout_is_found(tmp_path):
    old = tree(tmp_path / "old", src__thing___INIT_DOT_py="", tests__test_a_DOT_py="")
    new = tree(tmp_path / "new", src__thing___INIT_DOT_py="x = 1\n", tests__test_a_DOT_py="def test(): pass\n")
    assert compare(old, new).import_roots == ["src"]


@pytest.mark.parametrize(
    ("same", "message"),
    [("thing___INIT_DOT_py", "no source file changed"), ("tests__test_thing_DOT_py", "no test module changed")],
)
def test_releases_without_a_change_in_sources_or_tests_are_no_task(tmp_path, same, message):
    names = ("thing___INIT_DOT_py", "tests__test_thing_DOT_py")
    old = tree(tmp_path / "old", **{name: OLD[name] for name in names})
    new = tree(tmp_path / "new", **{name: (OLD if name == same else NEW)[name] for name in names})
    with pytest.raises(CurationError, match=message):
        compare(old, new)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tests/helper.py", True),
        ("thing/tests/data.json", True),
        ("test_thing.py", True),
        ("thing/conftest.py", True),
        ("thing/testimony.py", False),
        ("thing/contest.py", False),
    ],
)
def test_what_a_test_file_is(path, said):
    assert is_test(path) == said


# The instruction ------------------------------------------------------------------------------------------------------

CHANGELOG_1 = "Changes\n=======\n\n1.0 (2023-01-01)\n----------------\n\n* First release.\n"
CHANGELOG_2 = """Changes
=======

1.1 (2024-02-03)
----------------

Bug Fixes

* A tail is wagged again (#12, by Jane Doe).
* `Dog.sit()` takes a [reason](https://example.org/x), see https://example.org/y
  and keeps it.
* Drop support for Python 3.7
  and 3.8.

Documentation

1.0 (2023-01-01)
----------------

* First release.
"""


def test_the_changelogs_new_entries_are_kept_without_their_trimmings(tmp_path):
    old, new = tree(tmp_path / "old", CHANGES_DOT_rst=CHANGELOG_1), tree(tmp_path / "new", CHANGES_DOT_rst=CHANGELOG_2)
    text = "\n".join(changelog_entries(old, new))
    assert "* A tail is wagged again." in text
    assert "* `Dog.sit()` takes a reason, see" in text
    assert "  and keeps it." in text
    for noise in ("1.1", "2024", "#12", "Jane", "example.org", "3.7", "3.8", "Documentation", "First release", "---"):
        assert noise not in text


def test_the_title_is_an_entry_and_no_heading(tmp_path):
    old, new = tree(tmp_path / "old", CHANGES_DOT_rst=CHANGELOG_1), tree(tmp_path / "new", CHANGES_DOT_rst=CHANGELOG_2)
    issue, source = write_issue("dog", old, new, failing={"t.py::test_a": ""}, test_patch="")
    assert issue.splitlines()[0] == "dog: A tail is wagged again"
    assert source == "changelog"


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("* Files close ([#456] by [@someone])", "* Files close"),
        ("* Files close (thanks to one, two, and three)", "* Files close"),
        ("* Files close (issue785).", "* Files close."),
        ("* Files close, see [the docs](https://example.org/a_(b))", "* Files close, see the docs)"),
        ("* Files close in #12 by @someone", "* Files close"),
        ("* `close()` is called (twice)", "* `close()` is called (twice)"),
    ],
)
def test_credits_and_numbers_are_taken_out(tmp_path, line, kept):
    old, new = tree(tmp_path / "old", CHANGES_DOT_md="# Changes\n"), tree(tmp_path / "new", CHANGES_DOT_md=line)
    assert [each.rstrip() for each in changelog_entries(old, new)] == [kept]


def test_the_title_is_no_entry_that_only_opens_a_list(tmp_path):
    lines = "* Changes to functions\n    * Sorting takes a key\n    * Files close\n"
    old, new = tree(tmp_path / "old", CHANGES_DOT_md="# Changes\n"), tree(tmp_path / "new", CHANGES_DOT_md=lines)
    issue, _ = write_issue("dog", old, new, failing={"t.py::test_a": ""}, test_patch="")
    assert issue.splitlines()[0] == "dog: Sorting takes a key"


def test_a_changelog_that_was_rewritten_is_not_taken(tmp_path):
    lines = "".join(f"* Entry {number}\n" for number in range(500))
    old, new = tree(tmp_path / "old", CHANGES_DOT_rst=CHANGELOG_1), tree(tmp_path / "new", CHANGES_DOT_rst=lines)
    assert changelog_entries(old, new) == []


def test_without_a_changelog_the_tests_names_say_what_is_expected_and_nothing_of_their_code(tmp_path):
    failing = {
        "tests/test_dog.py::TestDog::test_sits_down[secret-42]": "TypeError: sit() got an unexpected argument",
        "tests/test_dog.py::TestDog::test_sits_down[other]": "",
        "tests/test_dog.py::test_barks": "",
    }
    patch = "+++ b/tests/test_dog.py\n+    assert Dog().sit() == 'expected value'\n"
    issue, source = write_issue(
        "dog", tree(tmp_path / "old"), tree(tmp_path / "new"), failing=failing, test_patch=patch
    )
    assert source == "test names"
    assert "- sits down (dog, Dog): today `TypeError: sit() got an unexpected argument`\n- barks (dog)" in issue
    for leak in ("secret", "42", "expected value", "assert", "test_"):
        assert leak not in issue


def test_phrases_of_odd_names():
    assert phrase("tests/test_x.py::test_") == "basic behaviour (x)"
    assert phrase("a/b_test.py::TestC::testing_d") == "testing d (b, C)"


def test_signatures_that_tests_call_and_nobody_could_guess_are_listed(tmp_path):
    old = tree(
        tmp_path / "old",
        dog___INIT_DOT_py="class Dog:\n    def sit(self): ...\n    def run(self, how): ...\ndef bark(loud=1): ...\n",
    )
    new = tree(
        tmp_path / "new",
        dog___INIT_DOT_py=(
            "class Dog:\n    def sit(self, *, reason=None): return 'the solution'\n    def run(self, how): ...\n"
            "    def roll(self): ...\n    def _hide(self): ...\n"
            "def bark(loud=1): ...\nclass Cat: ...\n"
        ),
    )
    patch = "--- a/t\n+++ b/t\n+Dog().sit(reason=1).run(2)._hide()\n+bark()\n-Dog().roll()\n"
    assert interface(old, new, patch) == ["dog.Dog._hide(self)", "dog.Dog.sit(self, *, reason=None)"]


def test_a_test_that_is_not_the_same_in_every_run_is_unstable():
    runs = [
        {"a": "PASSED", "b": "PASSED", "c": "FAILED"},
        {"a": "PASSED", "b": "FAILED"},
        {"a": "PASSED", "b": "PASSED"},
    ]
    assert stable(runs) == {"a": "PASSED", "b": UNSTABLE, "c": UNSTABLE}


def test_only_tests_with_the_same_result_in_every_run_are_in_a_list():
    before = [{"a": "PASSED", "b": "FAILED", "c": "PASSED"}, {"a": "PASSED", "b": "ERROR", "c": "PASSED"}]
    after = [
        {"a": "PASSED", "b": "PASSED", "c": "PASSED", "d": "PASSED"},
        {"a": "PASSED", "b": "PASSED", "d": "PASSED"},
    ]
    assert sort_tests(before, after) == (["d"], ["a"])


def test_ids_with_spaces_count_only_where_there_are_no_others():
    """Guards against a commit that fell, although its new tests failed before: all of their ids had spaces."""
    assert sort_tests([{"a[1 k]": "FAILED"}], [{"a[1 k]": "PASSED"}]) == (["a[1 k]"], [])
    assert sort_tests([{"a[1 k]": "FAILED"}], [{"a[1 k]": "PASSED", "b": "PASSED"}]) == (["b"], [])


# The index ------------------------------------------------------------------------------------------------------------


def archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as files:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 2
            files.addfile(member, io.BytesIO(b"x\n"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a-1/x.py", "b-1/x.py"], "expected one directory at the top"),
        (["a-1/../../x.py"], "cannot be unpacked"),
        (["/x.py"], "expected one directory at the top"),
    ],
)
def test_an_archive_that_is_no_release_is_refused_and_writes_nothing_elsewhere(tmp_path, names, message):
    path = tmp_path / "a-1.tar.gz"
    path.write_bytes(archive(*names))
    with pytest.raises(CurationError, match=message):
        unpack(path, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["a-1.tar.gz"]


def test_what_the_tests_need_is_read_from_metadata(tmp_path):
    info = (
        "Name: Dog-House\nRequires-Dist: attrs (>=20)\nRequires-Dist: tomli; python_version < '3.11'\n"
        "Requires-Dist: pytest-mock; extra == 'test'\nRequires-Dist: sphinx; extra == 'docs'\n"
        "Requires-Dist: dog_house[test]; extra == 'testing'\nRequires-Dist: ?!\n"
    )
    project = "[dependency-groups]\ntests = ['hypothesis', {include-group = 'docs'}]\ndocs = ['furo']\n"
    directory = tree(tmp_path / "dog", **{"PKG-INFO": info, "pyproject_DOT_toml": project})
    assert requirements(directory, "3.11.2") == ["attrs>=20", "pytest-mock", "hypothesis"]
    assert "tomli" in requirements(directory, "3.10.1")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index with one project, `dog`."""
    directory = tmp_path / "index"
    (directory / "dog").mkdir(parents=True)
    release = archive("dog-1.0/dog.py")
    (directory / "dog" / "dog-1.0.tar.gz").write_bytes(release)
    (directory / "dog" / "dog-1.1.tar.gz").write_bytes(b"damaged on its way")
    digest = hashlib.sha256(release).hexdigest()
    links = (f"<a href='dog-{version}.tar.gz#sha256={digest}'>dog-{version}.tar.gz</a>" for version in ("1.0", "1.1"))
    (directory / "dog" / "index.html").write_text(f"<html><body>{''.join(links)}</body></html>")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield directory
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_release_is_fetched_once(index, tmp_path):
    path = fetch_sdist("Dog", "1.0", tmp_path / "cache")
    assert path.read_bytes() == archive_of(index)
    (index / "dog" / "index.html").unlink()
    assert fetch_sdist("dog", "1.0", tmp_path / "cache") == path


def archive_of(index: Path) -> bytes:
    return (index / "dog" / "dog-1.0.tar.gz").read_bytes()


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        ("dog", "9.9", r"dog 9\.9: no \.tar\.gz source release; some that exist: \['1\.0', '1\.1'\]"),
        ("cat", "1.0", "cat: the package index has no such package"),
        ("dog", "1.1", r"dog 1\.1: was damaged on its way"),
    ],
)
def test_what_is_wrong_with_a_release_is_said_and_nothing_is_kept(index, tmp_path, package, version, message):
    with pytest.raises(CurationError, match=message):
        fetch_sdist(package, version, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.tar.gz"))
