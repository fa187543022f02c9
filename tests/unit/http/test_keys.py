"""The keys of the HTTP ports: where they come from, and which header holds one."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.errors import ConfigError
from polar_gym.http.keys import Keys, bearer_is, load_keys


def test_keys_come_from_the_environment_or_files_and_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("from-a-file-0123456789\n")
    monkeypatch.setenv("POLAR_GYM_SERVICE_KEY", "from-a-variable-0123456789")
    monkeypatch.setenv("POLAR_GYM_NODE_KEY_FILE", str(tmp_path / "key"))
    keys = load_keys()
    assert keys == Keys("from-a-variable-0123456789", "from-a-file-0123456789")
    assert "0123456789" not in repr(keys)
    assert keys.signing == keys.service
    monkeypatch.setenv("POLAR_GYM_SERVICE_KEY", "short")
    with pytest.raises(ConfigError, match="POLAR_GYM_SERVICE_KEY") as refused:
        load_keys()
    assert "short" not in str(refused.value).replace("shorter", "")


@pytest.mark.parametrize(
    ("header", "holds"),
    [
        ("Bearer one", True),
        ("Bearer two", True),
        ("Bearer tw", False),
        ("Basic one", False),
        (None, False),
        ("", False),
    ],
)
def test_a_header_holds_one_of_the_keys_or_none(header: str | None, holds: bool) -> None:
    assert bearer_is(header, ["one", "two"]) is holds
    assert not bearer_is(header, [])
