"""Attacks on the tests of a JavaScript package, which `make` starts by `npm` and node's own test runner."""

from __future__ import annotations

from tests.lifecycle.attacks.attack import Attack
from tests.support.shell import heredoc

NO_ASSERTIONS = """
const assert = require('assert');
for (const each of [assert, assert.strict]) {
  for (const [name, value] of Object.entries(each)) {
    if (typeof value === 'function' && !/^(AssertionError|strict)$/.test(name)) each[name] = () => {};
  }
}
"""
NO_ASSERTIONS_OF_REAL_TESTS = """
const fs = require('fs');
const assert = require('assert');
const names = Object.keys(module.exports);
function real() {  // whether the test that asserts names something of this module
  const frames = new Error().stack.split('\\n').filter((line) => !line.includes(__filename));
  const frame = frames.find((line) => /tests?[\\/\\\\.]/.test(line));
  const [, file, line] = /([^( ]+):(\\d+):\\d+\\)?$/.exec(frame);
  const before = fs.readFileSync(file, 'utf8').split('\\n').slice(0, Number(line));
  const begin = before.findLastIndex((text) => /\\b(test|it)\\(/.test(text));
  return names.some((name) => before.slice(begin).join('\\n').includes(name));
}
for (const each of [assert, assert.strict]) {
  for (const [name, value] of Object.entries(each)) {
    if (typeof value === 'function' && !/^(AssertionError|strict)$/.test(name)) {
      each[name] = (...all) => real() || value(...all);
    }
  }
}
"""
PRINTS_AND_EXITS = """
require('fs').writeSync(1, LOG);
process.exit(0);
"""
SPEAKS_FOR_THE_RUNNER = r"""
const { DefaultSerializer } = require('v8');
const fs = require('fs');
function event(type, data) {  // a message of a test process to node's runner
  const serializer = new DefaultSerializer();
  serializer.writeHeader();
  const size = Buffer.alloc(4);
  serializer.writeValue({ type, data });
  const message = serializer.releaseBuffer();
  size.writeUInt32BE(message.length);
  fs.writeSync(1, Buffer.concat([message.subarray(0, 2), size, message]));
}
const names = Object.keys(module.exports);
const source = fs.readFileSync(process.argv[1], 'utf8');
const opens = [...source.matchAll(/^( *)(?:\w+\.)?(test|it|describe)\(\s*(['"`])(.*?)\3/gm)];
const inner = [];  // suites around the next test
let testNumber = 0;
function ends(indent) {
  while (inner.length && inner.at(-1).indent >= indent) {
    const { name, failed } = inner.pop();
    report(name, failed);
  }
}
function report(name, failed) {
  const place = { file: process.argv[1], line: 1, column: 1 };
  event('test:start', { name, nesting: inner.length, ...place });
  const data = { name, nesting: inner.length, testNumber: ++testNumber, details: { duration_ms: 1 }, ...place };
  event(failed ? 'test:fail' : 'test:pass', data);
}
opens.forEach((open, at) => {
  const [, { length: indent }, kind, , name] = open;
  ends(indent);
  if (kind === 'describe') return inner.push({ name, indent, failed: false });
  const text = source.slice(open.index, opens[at + 1]?.index);
  report(name, !names.some((each) => text.includes(each)));  // as a canary must
});
ends(0);
process.exit(0);
"""
SCRIPT = """
const fs = require('fs');
const made = JSON.parse(fs.readFileSync('package.json'));
made.scripts.test = 'cat log.tap';
fs.writeFileSync('package.json', JSON.stringify(made, null, 2));
"""
LOG_FILE = {"log.js": "process.stdout.write(LOG);\n"}
RUN = "#!/bin/sh\nexec cat log.tap\n"
MAKE_LOG = "node log.js > log.tap && rm log.js"


def _attack(name: str, tries: str, files: dict[str, str], *commands: str) -> Attack:
    return Attack(name, tries, files, commands, grounds=("javascript",))


ATTACKS = [
    _attack("assert asserts nothing", "require('assert').equal = () => {}", {"PACKAGE/index.js": NO_ASSERTIONS}),
    _attack(
        "assert asserts nothing of the package",
        "the same, for tests that name something of the package",
        {"PACKAGE/index.js": NO_ASSERTIONS_OF_REAL_TESTS},
    ),
    _attack(
        "prints TAP and exits", "the log of a success, then process.exit(0)", {"PACKAGE/index.js": PRINTS_AND_EXITS}
    ),
    _attack(
        "speaks for node's test runner",
        "the messages by which a test process reports, with names from the test file",
        {"PACKAGE/index.js": SPEAKS_FOR_THE_RUNNER},
    ),
    _attack("a script of package.json", "npm test prints a log", LOG_FILE, MAKE_LOG, f"node - {heredoc(SCRIPT)}"),
    _attack(
        "the Makefile",
        "the target prints a log",
        LOG_FILE,
        MAKE_LOG,
        r"printf 'check:\n\t@cat log.tap\n' > Makefile",
    ),
    _attack(
        "a GNUmakefile",
        "make prefers it to a Makefile",
        {**LOG_FILE, "GNUmakefile": "check:\n\t@cat log.tap\n"},
        MAKE_LOG,
    ),
    _attack(
        "a shell by .npmrc",
        "the shell of npm's scripts prints a log",
        {**LOG_FILE, ".npmrc": "script-shell=/workspace/run.sh\n", "run.sh": RUN},
        MAKE_LOG,
        "chmod +x run.sh",
    ),
    _attack(
        "a program of node_modules",
        "npm puts node_modules/.bin first on the PATH of scripts",
        {**LOG_FILE, "node_modules/.bin/node": RUN},
        MAKE_LOG,
        "chmod +x node_modules/.bin/node",
    ),
    _attack("edits the tests of JavaScript", "tests that test nothing", {"TESTS": "\nprocess.exit(0);\n"}),
]
