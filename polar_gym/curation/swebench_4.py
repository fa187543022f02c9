"""Tells how swebench 4 runs and reads the tests of SWE-bench's tasks. A program for a Python that has only swebench 4.

swebench 5 expects `eval_script`, `log_parser` and `eval_type` in the row. Until version 4.1, swebench held the maps
from repository and version to these (`swebench.harness.constants`, `swebench.harness.log_parsers`). This program reads
one instance a line. It writes the fields that the instance's row lacks, or the wrong field and the reason.
"""

from __future__ import annotations

import json
import sys

NAMESPACE = "swebench"
"""The owner of the images at Docker Hub."""


def specification(instance: dict) -> dict[str, str]:
    from swebench.harness.constants import (  # pyright: ignore[reportMissingImports]
        FAIL_ONLY_REPOS,  # pyright: ignore[reportAttributeAccessIssue]
        MAP_REPO_VERSION_TO_SPECS,  # pyright: ignore[reportAttributeAccessIssue]
    )
    from swebench.harness.log_parsers import (  # pyright: ignore[reportMissingImports]
        MAP_REPO_TO_PARSER,  # pyright: ignore[reportAttributeAccessIssue]
    )
    from swebench.harness.test_spec import test_spec  # pyright: ignore[reportMissingImports]

    repo, version = instance["repo"], instance["version"]
    if repo not in MAP_REPO_VERSION_TO_SPECS:
        return {"field": "repo", "problem": f"swebench 4 does not know {repo!r}"}
    versions = MAP_REPO_VERSION_TO_SPECS[repo]
    if version not in versions:
        return {"field": "version", "problem": f"swebench 4 does not know {version!r} of {repo}, only {list(versions)}"}
    # The way the image was made does not matter here, and swebench would download the repository's requirements for it.
    test_spec.make_env_script_list = lambda *_: []
    spec = test_spec.make_test_spec(instance, namespace=NAMESPACE)
    return {
        "eval_script": spec.eval_script,
        "log_parser": MAP_REPO_TO_PARSER[repo].__name__,
        "eval_type": "fail_only" if repo in FAIL_ONLY_REPOS else "pass_and_fail",
        "image": spec.instance_image_key,
    }


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(specification(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
