"""Writes the canaries of a JavaScript or TypeScript test file: one for each way to compare that the file's tests use.

The canaries call the file's own `test` or `it`, with the assertions of node, jest, vitest, chai or ava. Code that
replaces one of these assertions makes its canary pass. A file whose tests compare in another way gets a canary that
throws. A file without tests gets none, nor does a file that starts its tests itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_FILE = re.compile(r"(.*/)?([^/]+[._-](test|spec)|(.*/)?(tests?|__tests__|specs?)/.*)\.[cm]?[jt]sx?")
_TEST = re.compile(r"^[ \t]*((?:\w{1,100}\.)?(?:test|it|specify))\([ \t]*['\"`]", re.MULTILINE)
_STARTS = re.compile(r"^[ \t]*\w+\.run\(\)", re.MULTILINE)
_COMPARISON = re.compile(
    r"\b(?P<node>assert(?:\.strict)?\.(?:equal|strictEqual|deepEqual|deepStrictEqual))\("
    r"|\)(?P<expect>\.(?:toBe|toEqual|toStrictEqual|to(?:\.be)?(?:\.deep)?\.(?:equals?|eql?)))\("
    r"|\bt\.(?P<ava>is|deepEqual)\("
)
MOST = 8
"""The most canaries of a file."""


def is_javascript_test(file: str) -> bool:
    """Return whether a path looks like a JavaScript or TypeScript file with tests."""
    return _FILE.fullmatch(file) is not None


def javascript_canaries(source: str, titles: Sequence[str], numbers: Sequence[int]) -> str:
    """Return the text to append to a test file with this source; "" where no canary fits.

    `titles`: a title for each of `MOST` canaries. `numbers`: three different positive numbers.
    """
    test = _TEST.search(source)
    if test is None or _STARTS.search(source):
        return ""
    a, b, c = numbers
    found = {(match.lastgroup, match[match.lastgroup or 0]) for match in _COMPARISON.finditer(source)}
    compare = {
        "node": "() => {{ {}(%d + %d, %d + %d + %d); }}",
        "expect": "() => {{ expect(%d + %d){}(%d + %d + %d); }}",
        "ava": "(t) => {{ t.{}(%d + %d, %d + %d + %d); }}",
    }
    bodies = [compare[str(kind)].format(how) % (a, b, a, b, c) for kind, how in sorted(found, key=str)]
    bodies = bodies or [f"() => {{ throw new Error('{a} is not {b}'); }}"]
    lines = [f"{test[1]}('{title}', {body});" for title, body in zip(titles, bodies, strict=False)]
    return "\n" + "\n".join(lines) + "\n"
