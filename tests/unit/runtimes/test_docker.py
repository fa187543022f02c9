"""The Docker runtime where no daemon answers."""

from __future__ import annotations

from pathlib import Path

from polar_gym.runtimes.docker import Docker
from polar_gym.runtimes.docker.daemon import Daemon, DockerOptions
from tests.support.processes import free_port


def test_a_daemon_that_does_not_answer_is_named_in_plain_words(tmp_path: Path) -> None:
    """Guards against nested Python exceptions in the lines of `polar-gym doctor`."""
    socket = f"unix://{tmp_path}/docker.sock"
    (problem,) = Docker(DockerOptions(host=socket)).check()
    assert problem.startswith(
        f"no Docker daemon answers at {socket} (No such file or directory); install and start one"
    )
    url = f"tcp://127.0.0.1:{free_port()}"
    (problem,) = Docker(DockerOptions(host=url)).check()
    assert problem.startswith(f"no Docker daemon answers at {url} (Connection refused); install and start one")


def test_the_size_of_each_file_is_limited_beside_the_disk() -> None:
    """Guards against sandboxes without any limit where the daemon takes `storage_opt` and ignores it."""
    sent = Daemon(DockerOptions(disk_mb=3)).limits()
    assert sent["storage_opt"] == {"size": "3m"}
    assert {limit["Name"]: (limit["Soft"], limit["Hard"]) for limit in sent["ulimits"]} == {
        "core": (0, 0),
        "fsize": (3 * 2**20, 3 * 2**20),
    }
    unlimited = Daemon(DockerOptions(disk_mb=None)).limits()
    assert "storage_opt" not in unlimited
    assert [limit["Name"] for limit in unlimited["ulimits"]] == ["core"]
