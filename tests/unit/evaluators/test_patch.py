"""Taking a patch apart, tried on what git itself writes."""

import subprocess
from pathlib import Path

import pytest

from polar_gym.evaluators.patch import file_changes

NAMES = ["a.py", "dir/a b.py", 'quo"te.py', "tab\there.py", "été.py", " b/a.py", "binary"]


def diff_of(repository: Path, *arguments: str) -> bytes:
    git = ["git", "-c", "user.name=T", "-c", "user.email=t@localhost", "-C", str(repository)]
    subprocess.run([*git, "add", "-A"], check=True)
    shown = subprocess.run([*git, "diff", "--cached", "--binary", *arguments, "HEAD"], check=True, capture_output=True)
    return shown.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git = ["git", "-c", "user.name=T", "-c", "user.email=t@localhost", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "base"], check=True)
    return tmp_path


def test_every_name_is_seen_as_it_is_on_disk(repository):
    for name in NAMES:
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0binary" if name == "binary" else b"diff --git a/x b/x\n")
    diff = diff_of(repository, "--no-renames")
    changes = file_changes(diff)
    assert b"".join(change.section for change in changes) == diff
    assert {change.path.decode() for change in changes} == set(NAMES)
    assert all(change.new for change in changes)
    binary = next(change for change in changes if change.path == b"binary")
    assert binary.section.startswith(b"diff --git a/binary b/binary\nnew file")


def test_new_files_are_told_from_changed_ones(repository):
    (repository / "old.py").write_text("new file mode\n")
    git = ["git", "-c", "user.name=T", "-c", "user.email=t@localhost", "-C", str(repository)]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "more"], check=True)
    (repository / "old.py").write_text("new file mode 2\n")
    (repository / "new.py").touch()
    changes = file_changes(diff_of(repository, "--no-renames"))
    assert [(change.path, change.new) for change in changes] == [(b"new.py", True), (b"old.py", False)]


def test_what_is_not_plain_is_refused(repository):
    (repository / "old.py").write_text("content\n" * 20)
    git = ["git", "-c", "user.name=T", "-c", "user.email=t@localhost", "-C", str(repository)]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "more"], check=True)
    (repository / "old.py").rename(repository / "new.py")
    with pytest.raises(ValueError, match=r"cannot tell the path in 'a/old\.py b/new\.py'"):
        file_changes(diff_of(repository, "--find-renames"))
    with pytest.raises(ValueError, match="does not begin"):
        file_changes(b"--- a/x\n+++ b/x\n")
    assert file_changes(b"") == []


FORGED = {
    "an escape that git does not know": (
        'diff --git "a/notes\\x2etxt" "b/notes\\x2etxt"\nold mode 100644\nnew mode 100755\n'
        "--- a/test_hard.py\n+++ b/notes.txt\n",
        "git knows no such escape",
    ),
    "another name behind ---": (
        "diff --git a/notes.txt b/notes.txt\nold mode 100644\nnew mode 100755\n--- a/test_hard.py\n+++ b/notes.txt\n",
        r"'--- a/test_hard\.py\\n': git writes no such line",
    ),
    "a new file behind the index": (
        "diff --git a/attr.py b/attr.py\nindex 0000000..257cc56\nnew file mode 100644\n"
        "--- /dev/null\n+++ b/attr.py\n@@ -0,0 +1 @@\n+x\n",
        r"'new file mode 100644\\n': git writes no such line",
    ),
    "a new file without a mode": (
        "diff --git a/attr.py b/attr.py\n--- /dev/null\n+++ b/attr.py\n@@ -0,0 +1 @@\n+x\n",
        r"'--- /dev/null\\n': git writes no such line",
    ),
}


@pytest.mark.parametrize(("diff", "says"), FORGED.values(), ids=FORGED)
def test_a_header_that_git_does_not_write_is_refused(diff, says):
    """Guards against a patch that removes a protected file, or makes one, in the section of another file: git reads the
    names of a header in more ways than it writes them."""
    with pytest.raises(ValueError, match=says):
        file_changes(diff.encode())


@pytest.mark.parametrize("way", ["rename", "copy"])
@pytest.mark.parametrize("place", ["before its names", "behind its names"])
def test_no_line_has_git_write_another_file_than_the_path(repository, way, place):
    """Guards against a patch that writes a hidden test in the section of a file that is not protected."""
    (repository / "evil.py").write_text("evil\n")
    subprocess.run(["git", "-C", str(repository), "add", "-A"], check=True)
    names = "--- a/foo.txt\n+++ b/foo.txt\n"
    lines = f"similarity index 90%\n{way} from evil.py\n{way} to test_new.py\n"
    head = names + lines if place == "behind its names" else lines
    diff = f"diff --git a/foo.txt b/foo.txt\n{head}@@ -1 +1 @@\n-evil\n+worse\n".encode()
    subprocess.run(["git", "-C", str(repository), "apply"], input=diff, check=True)
    assert (repository / "test_new.py").read_text() == "worse\n", "git takes it"
    with pytest.raises(ValueError, match=f"'{way} from evil.py': the patch renames or copies a file"):
        file_changes(diff)
