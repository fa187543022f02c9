"""The requirements that the files of a repository declare."""

from pathlib import Path

import pytest

from polar_gym.curation import CurationError
from polar_gym.curation.declared import package_name, requirements, version_file


def written(tree: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tree


TESTS = {"tests/test_a.py": "import hypothesis\nfrom yaml import load\n"}


@pytest.mark.parametrize(
    ("files", "name", "needed"),
    [
        (
            {
                "pyproject.toml": '[project]\nname = "thing"\ndependencies = ["attrs>=23", "x; python_version<\'3\'"]\n'
                "[project.optional-dependencies]\ndocs = ['sphinx']\n"
                "test = ['pytest-cov', 'pytest-flake8', 'pytest-pretty']\n"
                "[dependency-groups]\ndev = ['mypy', 'hypothesis', 'pytest-mock', {include-group = 'x'}]\n"
            },
            "thing",
            ["attrs>=23", "pytest-cov", "hypothesis", "pytest-mock"],
        ),
        (
            {
                "pyproject.toml": '[tool.poetry]\nname = "thing"\n[tool.poetry.dependencies]\npython = "^3.8"\n'
                'attrs = "^23.0"\n[tool.poetry.group.test.dependencies]\nfreezegun = "*"\n'
                '[tool.poetry.dev-dependencies]\nblack = "*"\nhypothesis = "^6"\n'
            },
            "thing",
            ["attrs", "freezegun", "hypothesis"],
        ),
        (
            {
                "setup.cfg": "[metadata]\nname = thing\n[options]\ninstall_requires =\n    attrs\n"
                "[options.extras_require]\ntests =\n    freezegun\ndocs =\n    sphinx\n",
                "tox.ini": "[testenv]\ndeps =\n    pytest-xdist\n    -r requirements.txt\n",
            },
            "thing",
            ["attrs", "freezegun", "pytest-xdist"],
        ),
        (
            {
                "setup.py": "from setuptools import setup\nNEEDS = ['attrs']\nimport os; os.remove('/nothing')\n"
                "setup(name='thing', install_requires=NEEDS, tests_require='freezegun', version=read())\n"
            },
            "thing",
            ["attrs", "freezegun"],
        ),
        (
            {
                "requirements-test.txt": "# tests\nfreezegun==1.2  # time\n-e .\nthing\nx @ https://example.org/x.whl\n",
                "requirements/dev.txt": "black\nhypothesis\nPyYAML\n",
                "requirements/docs.txt": "sphinx\n",
            },
            None,
            ["freezegun==1.2", "thing", "hypothesis", "PyYAML"],
        ),
        ({"setup.py": "print 'Python 2'\n"}, None, []),
    ],
    ids=["pep-621", "poetry", "setup.cfg", "setup.py", "files", "unreadable"],
)
def test_requirements_of_the_package_and_its_tests(
    tmp_path: Path, files: dict[str, str], name: str | None, needed: list[str]
) -> None:
    tree = written(tmp_path, {**files, **TESTS})
    assert package_name(tree) == name
    assert sorted(requirements(tree, "3.11.2")) == sorted(needed)


@pytest.mark.parametrize(("file", "text"), [("pyproject.toml", "[project\n"), ("setup.cfg", "no section\n")])
def test_a_broken_file_is_named(tmp_path: Path, file: str, text: str) -> None:
    with pytest.raises(CurationError, match=rf"{file}: "):
        requirements(written(tmp_path, {file: text}), "3.11.2")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('[tool.setuptools_scm]\nversion_file = "src/a/_version.py"\n', "src/a/_version.py"),
        ('[tool.hatch.build.hooks.vcs]\nversion-file = "a/_version.py"\n', "a/_version.py"),
        ('[tool.setuptools_scm]\nwrite_to = "../a.py"\n', None),
        ("", None),
    ],
)
def test_the_file_that_a_build_writes_the_version_to(tmp_path: Path, text: str, path: str | None) -> None:
    assert version_file(written(tmp_path, {"pyproject.toml": text})) == path
