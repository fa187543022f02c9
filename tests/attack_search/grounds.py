"""The tasks that are attacked, each with what an agent sees of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from polar_gym.tasks import Task
from tests.lifecycle.grading_bench import BUNDLED, make_patch, prices_task, scripted


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A task, and the names in it."""

    name: str
    task: Task
    package: str
    entry: str
    """The file that the tests import."""
    modules: tuple[str, ...]
    """Other files that the entry imports; the entry itself where there is none."""
    test_file: str
    partial: Mapping[str, tuple[str, str]]
    """Path -> (old, new): a change that looks honest and does not solve the task."""
    language: Literal["python", "javascript"] = "python"
    base: dict[str, bytes] = field(init=False, repr=False)
    """Path -> content at the base commit."""

    def __post_init__(self) -> None:
        source = Path(self.task.workspace or "")
        texts = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
        object.__setattr__(self, "base", {path: text for path, text in texts.items() if "__pycache__" not in path})
        for path, (old, new) in self.partial.items():
            if old.encode() not in self.base[path] or old == new:
                raise ValueError(f"{self.name}: partial: {path} does not hold {old!r}")

    def named(self, text: str) -> str:
        """Return the text with this ground's names in the place of the placeholders."""
        module = self.modules[0].removesuffix(".py").replace("/", ".")
        names = {
            "@PACKAGE@": self.package,
            "@MODULE@": module,
            "@TEST_FILE@": self.test_file,
            "@TEST_MODULE@": self.test_file.removesuffix(".py").replace("/", "."),
            "@TEST_DIRECTORY@": self.test_file.rpartition("/")[0],
        }
        for placeholder, name in names.items():
            text = text.replace(placeholder, name)
        return text


def bundled(name: str, partial: Mapping[str, tuple[str, str]]) -> Ground:
    """Return the ground of a bundled task, whose tests are unittest's."""
    task = BUNDLED[name]
    source = Path(task.workspace or "")
    modules = sorted(str(path.relative_to(source)) for path in (source / name).glob("*.py"))
    entry = f"{name}/__init__.py"
    return Ground(
        name=name,
        task=task,
        package=name,
        entry=entry,
        modules=tuple(module for module in modules if module != entry),
        test_file=f"tests/test_{name}.py",
        partial=partial,
    )


def _prices(name: str, task: Task) -> Ground:
    return Ground(
        name=name,
        task=task,
        package="prices",
        entry="prices/__init__.py",
        modules=("prices/total.py",),
        test_file="tests/test_prices.py",
        partial={"prices/total.py": ("// 10\n", "// 10 if discount else sum(prices)\n")},
    )


SLUGS = {
    "package.json": '{"name": "slugs", "version": "1.0.0", "main": "index.js", "scripts": {"test": "node --test"}}\n',
    "index.js": (
        "'use strict';\n\n"
        "function slug(text) {\n"
        "  return text.trim().toLowerCase().replace(/[^a-z0-9]/g, '-');\n"
        "}\n\n"
        "module.exports = { slug };\n"
    ),
    "test/slugs.test.js": (
        "'use strict';\n\n"
        "const assert = require('node:assert');\n"
        "const test = require('node:test');\n"
        "const { slug } = require('..');\n\n"
        "test('keeps a plain word', () => {\n  assert.strictEqual(slug('word'), 'word');\n});\n"
    ),
}
_SLUGS_HIDDEN = (
    "\ntest('joins words with one dash', () => {\n  assert.strictEqual(slug('two,  words'), 'two-words');\n});\n"
    "\ntest('has no dash at the end', () => {\n  assert.strictEqual(slug('what?'), 'what');\n});\n"
)
_SLUGS_SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /workspace
git checkout HEAD test/slugs.test.js
git apply -v - <<'EOF_TESTS'
{test_patch}
EOF_TESTS
: '>>>>> Start Test Output'
node --test --test-reporter=tap test/slugs.test.js
: '>>>>> End Test Output'
git checkout HEAD test/slugs.test.js
"""


def slugs(directory: Path) -> Ground:
    """Return a ground of JavaScript, graded by swebench's reader of TAP; its files are made below `directory`."""
    source = directory / "slugs-source"
    for name, text in SLUGS.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    right = SLUGS["index.js"].replace("replace(/[^a-z0-9]/g, '-')", r"replace(/[^a-z0-9]+/g, '-').replace(/-$/, '')")
    test_file = "test/slugs.test.js"
    test_patch = make_patch(directory, SLUGS, {test_file: SLUGS[test_file] + _SLUGS_HIDDEN})
    task = Task.model_validate(
        {
            "instance_id": "polar__slugs-1",
            "problem_statement": "slug() leaves double and trailing dashes\n",
            "repo": "polar/slugs",
            "workspace": str(source),
            "patch": make_patch(directory, SLUGS, {"index.js": right}),
            "test_patch": test_patch,
            "eval_script": _SLUGS_SCRIPT.format(test_patch=test_patch),
            "log_parser": "parse_log_tap",
            "version": "1.0",
            "FAIL_TO_PASS": ["- joins words with one dash", "- has no dash at the end"],
            "PASS_TO_PASS": ["- keeps a plain word"],
        }
    )
    return Ground(
        name="node",
        task=task,
        package="slugs",
        entry="index.js",
        modules=("index.js",),
        test_file=test_file,
        partial={"index.js": ("[^a-z0-9]/g", "[^a-z0-9]+/g")},
        language="javascript",
    )


def grounds(directory: Path) -> dict[str, Ground]:
    """Return all grounds by name; files are made below `directory`."""
    prices = prices_task(directory)
    script = scripted(prices).model_copy(update={"instance_id": "polar__prices-script-1"})
    found = (
        bundled(
            "intervals", {"intervals/intervalset.py": ("runs that it connects.", "runs that it connects or touches.")}
        ),
        bundled("durations", {"durations/parsing.py": ("amount[0] in", "amount[:1] in")}),
        _prices("pytest", prices),
        _prices("script", script),
        slugs(directory),
    )
    return {ground.name: ground for ground in found}
