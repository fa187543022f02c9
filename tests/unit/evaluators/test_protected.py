"""Which changes of an agent's count, by path."""

import subprocess

import pytest

from polar_gym.evaluators.canary import runs_whole_files, with_canaries
from polar_gym.evaluators.hidden_tests import LIST_MODULES
from polar_gym.evaluators.patch import FileChange, file_changes
from polar_gym.evaluators.protected import TaskFiles, is_test_module, named_by
from polar_gym.evaluators.test_on_output import TestOnOutputOptions as Options
from polar_gym.evaluators.twins import Twins


def counts(path: str, tests: list[str], command: str, *, owned: str = "") -> bool:
    files = TaskFiles(owned=[owned] if owned else [], tests=tests, command=command)
    return not files.protects(FileChange(path=path.encode(), new=False, section=b""))


@pytest.mark.parametrize("path", ["tests/helpers.py", "tests/base/__init__.py", "tests/data/expected.json"])
@pytest.mark.parametrize("test", ["tests.test_a.T.test_x", "test_x (tests.test_a.T)"])
def test_files_around_tests_of_unittest_do_not_count(path: str, test: str) -> None:
    """Guards against an assertion helper without assertions."""
    assert not counts(path, [test], "python3 -m unittest -v tests.test_a")
    assert counts(path.replace("tests", "src"), [test], "python3 -m unittest -v tests.test_a")


@pytest.mark.parametrize(
    "command",
    [
        *("cd backend && pytest tests", "cd /testbed/backend; pytest", "pytest --rootdir=backend", "make -C backend"),
        *('sh -c "cd backend && pytest"', "uv run --directory backend pytest", "cd -- backend; pytest"),
    ],
)
def test_ids_may_be_relative_to_the_directory_of_the_command(command: str) -> None:
    """Guards against tests that the agent may change, because their ids do not begin at the workspace."""
    tests = ["tests/test_a.py::test_x", "app/test_b.py::test_y"]
    for path in ("backend/tests/test_a.py", "backend/tests/helpers.py", "backend/app/test_b.py"):
        assert not counts(path, tests, command)
    assert counts("backend/app/b.py", tests, command)
    assert counts("frontend/tests/test_a.py", tests, command)
    assert not counts("backend/tests/helpers.py", ["test_x (tests.test_a.T)"], command)


def test_directories_of_a_command_add_up() -> None:
    assert not counts("backend/api/tests/test_a.py", ["tests/test_a.py::test_x"], "cd backend; cd api; pytest")


@pytest.mark.parametrize(
    ("path", "command"),
    [("six.py", "cd /workspace/six && pytest tests/test_a.py"), ("app.py", "cd backend/app && pytest")],
)
def test_source_with_the_name_of_a_directory_counts(path: str, command: str) -> None:
    """Guards against a right solution that is worth nothing, because the workspace has the name of its module."""
    assert counts(path, ["tests/test_a.py::test_x"], command)


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("src/b.test.js", ["A > x", "B > y"]),
        ("pkg/b_test.go", ["TestA", "TestB"]),
        ("src/BTest.java", ["com.a.ATest.adds"]),
    ],
)
def test_existing_tests_do_not_count_where_ids_name_no_files(path: str, tests: list[str]) -> None:
    """Guards against tests beside the source, of which the patch touches others."""
    assert not counts(path, tests, "run the tests")
    assert counts(path.replace("b", "c").replace("Test", "").replace("test", "other"), tests, "run the tests")
    assert counts(path, ["tests/test_a.py::test_x"], "pytest")
    assert counts("src/main/java/org/TTest.java", tests, "mvn test"), "a class of the product"


FILES = TaskFiles(
    owned=["pkg/tests/unit/test_a.py", "checks/test_b.py"],
    tests=["lib/test_c.py::test_x", "tests.test_d.T.test_y", "test_z (mod.test_e.T)"],
    command="python runtests.py --flag=scripts/run.sh && make all <<'END'\ncargo pkg/core.py\nEND\n",
    importable=["attr", "yaml", "calendar", "unittest", "pluggy"],
)


@pytest.mark.parametrize(
    "path",
    [
        "pkg/tests/unit/test_a.py",
        "pkg/tests/helpers/data.json",
        "pkg/tests/__init__.py",
        "pkg/tests.py",
        "checks/test_b.py",
        "checks/test_b/__init__.py",
        "checks/test_b.cpython-311-x86_64-linux-gnu.so",
        "checks.py",
        "lib/test_c.py",
        "tests/test_d.py",
        "sub/tests/test_d.py",
        "mod/test_e.py",
        "conftest.py",
        "deep/down/conftest.py",
        "conftest/__init__.py",
        "conftest.cpython-311-x86_64-linux-gnu.so",
        "pytest.ini",
        "sub/.pytest.ini",
        "pyproject.toml",
        "setup.cfg",
        "tox.ini",
        "sitecustomize.py",
        "usercustomize/__init__.py",
        "evil.pth",
        "evil.egg-info/entry_points.txt",
        "evil-1.0.dist-info/entry_points.txt",
        "evil-1.0.DIST-INFO/entry_points.txt",
        "evil.EGG-INFO/entry_points.txt",
        "evil.egg/EGG-INFO/entry_points.txt",
        "package.json",
        "deep/down/package.json",
        "node_modules/.bin/node",
        "__mocks__/chai.js",
        ".npmrc",
        ".mocharc.yml",
        "jest.config.ts",
        "babel.config.js",
        "tsconfig.test.json",
        "noxfile.py",
        "Makefile",
        "GNUmakefile",
        "build/rules.mk",
        "attr.py",
        "src/attr.py",
        "yaml/__init__.py",
        "calendar.cpython-311-x86_64-linux-gnu.so",
        "pkg/x.pyc",
        "unittest.py",
        "unittest/__init__.py",
        "pluggy.so",
    ],
)
def test_the_tasks_own(path):
    assert FILES.protects(FileChange(path.encode(), True, b""))


@pytest.mark.parametrize("path", ["runtests.py", "scripts/run.sh"])
def test_what_the_command_names_is_the_tasks_where_the_base_has_it(path):
    assert FILES.protects(FileChange(path.encode(), False, b""))
    assert not FILES.protects(FileChange(path.encode(), True, b""))


@pytest.mark.parametrize(
    "path",
    [
        "pkg/core.py",
        "pkg/testing.py",
        "checks/core.py",
        "checks/__init__.py",
        "src/_pytest/runner.py",
        "lib/test_f.py",
        "setup.py",
        "tasks.py",
        "Cargo.toml",
        "build.rs",
        "CMakeLists.txt",
        "go.mod",
        "vendor/module/code.go",
        "pkg/attr.py",
        "attrs.py",
        "calendar.json",
        "configuration/jest.ts",
        "packages.json",
        "mod/e.py",
        "tests_of_taste.py",
        "pkg/conftest_tools.py",
    ],
)
def test_the_agents_own(path):
    assert not FILES.protects(FileChange(path.encode(), True, b""))


@pytest.mark.parametrize(
    ("command", "theirs", "of_a_solution"),
    [
        ("cargo test --offline", ["Cargo.toml", "crates/a/build.rs", ".cargo/config.toml"], ["src/build.rs.txt"]),
        ("./gradlew test", ["build.gradle.kts", "sub/settings.gradle", "buildSrc/a.kt"], ["src/gradle_like.java"]),
        ("mvn -o test", ["pom.xml", ".mvn/maven.config"], ["src/Pom.java"]),
        ("go test ./...", ["vendor/github.com/x/assert.go"], ["go.mod", "vendors/a.go"]),
        ("cmake --build b && ctest", ["CMakeLists.txt", "cmake/Find.cmake"], ["src/cmake.c", "Makefile"]),
        ("python -m pip install -e . && pytest", ["setup.py"], ["pkg/setup.py", "tasks.py"]),
        ("invoke test", ["tasks.py"], ["pkg/tasks.py", "setup.py"]),
    ],
)
def test_files_of_the_program_that_the_command_names(command, theirs, of_a_solution):
    files = TaskFiles(owned=[], tests=["t::a"], command=command)
    assert all(files.protects(FileChange(path.encode(), False, b"")) for path in theirs)
    assert not any(files.protects(FileChange(path.encode(), False, b"")) for path in of_a_solution)


def test_go_module_may_be_needed_but_not_replaced():
    needed, replaced = b"+require github.com/a/b v1.2.3\n", b"+replace github.com/a/assert => ./evil\n"
    assert not FILES.protects(FileChange(b"go.mod", False, b"diff --git\n" + needed))
    assert FILES.protects(FileChange(b"go.mod", False, b"diff --git\n" + replaced))


def test_modules_that_python_finds_outside_of_the_workspace(tmp_path):
    (tmp_path / "pkgutil.py").write_text("raise SystemExit('imported from the workspace')")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "calendar.py").touch()
    (tmp_path / "pygments").mkdir()
    (tmp_path / "pygments" / "__init__.py").touch()
    (tmp_path / "packaging").mkdir()
    (tmp_path / "logging.conf").touch()
    argv = ["sh", "-c", LIST_MODULES, "sh", "nose2", "pygments", "packaging"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    names = set(done.stdout.split())
    assert {"unittest", "json", "sys", "nose2"} <= names
    assert {"logging", "packaging"} <= names, "these are no modules in the workspace, and an agent could make them"
    assert not {"pkgutil", "calendar", "pygments"} & names, "the workspace has modules of these names"


def test_modules_of_runners_are_named_without_a_python_on_the_path(tmp_path):
    """Guards against a `pytest.py` of the agent's, where the command names its Python by a path of its own."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "coverage.py").touch()
    argv = ["/bin/sh", "-c", LIST_MODULES, "sh", "pytest", "coverage"]
    done = subprocess.run(argv, cwd=tmp_path, env={"PATH": "/none"}, capture_output=True, text=True, check=True)
    assert "pytest" in done.stdout.split()
    assert "coverage" not in done.stdout.split()


def test_a_directory_that_is_no_package_hides_no_installed_one():
    """Guards against dropped files of solutions where a project's directory has the project's name, as in yaml/yaml."""
    told = {"yaml/yaml/new.py": False, "calendar/new.py": False, "src/yaml/__init__.py": True, "pluggy/new.py": True}
    assert {path: FILES.protects(FileChange(path.encode(), True, b"")) for path in told} == told


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        *(("attr", True), ("src", True), ("lib/yaml", True), ("docs/attr", False), ("data", False)),
        *(("attr.py", True), ("data.py", False)),
    ],
)
def test_a_new_link_is_no_way_around(path, theirs):
    """Guards against a link to a package, which has no `.py` in its name, and against one to a module."""
    patch = f"diff --git a/{path} b/{path}\nnew file mode 120000\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+pkg\n"
    (change,) = file_changes(patch.encode())
    assert FILES.protects(change) == theirs


def test_module_of_the_base_commit_may_have_the_name_of_an_installed_one():
    assert not FILES.protects(FileChange(b"attr.py", False, b""))


def test_the_runner_itself_may_be_what_is_worked_on():
    assert not FILES.protects(FileChange(b"pytest.py", False, b""))


def test_named_files_and_directories():
    protects = named_by(["a/b", "c.txt"])
    wanted = {b"a/b": True, b"a/b/c": True, b"c.txt": True, b"a/bc": False, b"d/c.txt": False}
    assert {path: protects(FileChange(path, True, b"")) for path in wanted} == wanted


@pytest.mark.parametrize(
    ("path", "is_test"), [("a/test_b.py", True), ("a/b_test.py", True), ("tests.py", True), ("a.py", False)]
)
def test_test_modules(path, is_test):
    assert is_test_module(path) is is_test
    assert not is_test_module(path.replace(".py", ".js"))


# Canaries -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "whole"),
    [
        ("pytest -rA tests/test_a.py", True),
        ("python -m unittest discover -v -p test_a.py", True),
        ("./tests/runtests.py --verbosity 2 a.b --parallel 1", True),
        ("python -m pytest tests", True),
        ("python -m unittest -v tests.test_a", True),
        ("python -m unittest discover -s tests -t .", True),
        ("python -m unittest discover -s My.Pkg", True),
        ("pytest -rA tests && python -m coverage report", True),
        ("npx jest src", True),
        ("python -m unittest -v tests.test_a.TestX", False),
        ("python -m unittest tests.test_a.TestX.test_y tests.test_b", False),
        ("./tests/runtests.py queries.tests.Q", False),
        ("python -m pytest -rA -m integration tests", False),
        ("pytest -rA --sw tests", False),
        ("npx jest -t adds src", False),
        ("pytest tests/test_a.py::test_b", False),
        ("pytest -k name", False),
        ("pytest -x tests", False),
        ("pytest --maxfail=1", False),
        ("python -m unittest -f tests", False),
        ("pytest --deselect=a.py", False),
    ],
)
def test_canaries_go_where_all_tests_run(command, whole):
    assert runs_whole_files(command) is whole


@pytest.mark.parametrize(
    ("tests", "chosen"),
    [
        (["tests/test_a.py::test_x[a.b]", "[100%]"], ["tests/test_a.py"]),
        (["test_x (unit.test_b.T)", "a description"], ["tests/unit/test_b.py"]),
        (["tests.unit.test_b.T.test_x"], ["tests/unit/test_b.py"]),
        (["sub/test_c.py::test_x"], ["tests/test_a.py", "tests/unit/test_b.py"]),
        (["test_x", "suite > test"], ["tests/test_a.py", "tests/unit/test_b.py"]),
    ],
)
def test_canaries_go_where_listed_tests_are(tests: list[str], chosen: list[str]) -> None:
    owned = ["tests/test_a.py", "tests/unit/test_b.py"]
    assert sorted(TaskFiles(owned=owned, tests=tests, command="pytest").with_tests(owned)) == chosen


def planted() -> tuple[Twins, str]:
    """Return a Python test file with nothing but canaries, as an object and as a text."""
    twins = with_canaries(Twins({"test_a.py": b""}, {}, ()), ["test_a.py"])
    return twins, twins.texts["test_a.py"].decode()


def test_canary_judges_what_is_said_of_it():
    twins, text = planted()
    first, second, third = (name for name in twins.canaries if name.startswith("test_"))
    assert all(f"def {name}(" in text for name in (first, second, third))
    said = {f"t.py::{first}": "FAILED", "t.py::other": "PASSED"}
    assert twins.check(said, {}, "the log") == ("", "")
    assert "is reported as passed" in twins.check({**said, f"t.T.{second}": "PASSED"}, {}, "the log")[0]
    assert "not reported" in twins.check({"t.py::other": "PASSED"}, {}, "the log")[1]
    assert "not reported" in twins.check({f"t.py::{third}": "SKIPPED"}, {}, "the log")[1]


def test_canaries_are_tests_that_fail():
    _, text = planted()
    space: dict[str, object] = {}
    exec(text, space)
    for name, value in list(space.items()):
        if name.startswith("test_"):
            with pytest.raises(AssertionError):
                value()  # pyright: ignore[reportCallIssue]
        elif name.startswith("Test"):
            for test in (each for each in dir(value) if each.startswith("test_")):
                with pytest.raises(AssertionError):
                    getattr(value(test), test)()  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("path", ["/workspace/tests", "../workspace/tests", "tests/*"])
def test_a_protected_path_that_names_nothing_is_refused(path: str):
    """It protected no file: an agent's change to the tests counted."""
    with pytest.raises(ValueError, match=r"protected\n.*protects nothing; name a file or directory relative to"):
        Options(command="true", protected=[path])
