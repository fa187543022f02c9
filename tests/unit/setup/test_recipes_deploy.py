"""The Kubernetes recipe holds to the schemas of Kubernetes itself, which the package kubernetes-validate ships."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

RECIPE = Path(__file__).parents[3] / "recipes" / "deploy" / "kubernetes.yaml"
VERSION = "1.34"
"""Of Kubernetes."""


def documents() -> list[Any]:
    return list(yaml.safe_load_all(RECIPE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("document", documents(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_a_document_is_valid(document: Any) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_wrong_key_is_found() -> None:
    wrong = copy.deepcopy(next(each for each in documents() if each["kind"] == "StatefulSet"))
    wrong["spec"]["template"]["spec"]["hostUser"] = False
    with pytest.raises(kubernetes_validate.ValidationError, match="hostUser"):
        kubernetes_validate.validate(wrong, VERSION, strict=True)
