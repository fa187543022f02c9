"""`polar-gym serve` and `submit`: what is wrong is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.durable import read_records
from polar_gym.errors import ConfigError
from polar_gym.schema import TaskRequest
from polar_gym.service.settings import split_settings
from tests.lifecycle.peer_node import make_request


def test_own_settings_are_told_from_those_of_nodes() -> None:
    own, others = split_settings(["listen=127.0.0.1:0", "cluster=ray", "cluster.nodes=3", "pools.run=8", "engine=vllm"])
    assert (own.port, own.cluster.name, own.cluster.nodes, own.cluster.num_cpus) == (0, "ray", 3, 1)
    assert others == ["pools.run=8", "engine=vllm"]
    assert split_settings([])[0].cluster.name == "local"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cluster=slurm"], "cluster='slurm': unknown cluster; known: local, none, ray"),
        (["cluster.colour=red"], "cluster.colour='red': unknown key; known here:"),
        (["cluster=ray", "cluster.nodes=0"], "cluster.nodes=0: "),
        (["cluster.nodes=2"], "nodes: only with cluster=ray"),
        (["url=foo"], "url='foo': .*expected a URL"),
        (["listen=8700"], "listen='8700': .*expected host:port"),
        (["lease_seconds=-1"], "lease_seconds='-1'"),
        (["verbose"], "'verbose': expected key=value"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        split_settings(arguments)


def test_a_file_of_requests_is_checked_line_by_line(tmp_path: Path) -> None:
    def read(file: Path) -> list[TaskRequest]:
        return list(read_records(file, TaskRequest, "request", "a task request"))

    file = tmp_path / "tasks.jsonl"
    good = make_request("t").to_json()
    file.write_bytes(good + b"\n\n" + good + b"\n")
    assert [request.task_id for request in read(file)] == ["t", "t"]
    for bad, said in [
        (b'{"task_id": "t"}', r"tasks\.jsonl:2: not a task request: instruction: is required"),
        (b"nonsense", r"tasks\.jsonl:2: not JSON"),
    ]:
        file.write_bytes(good + b"\n" + bad)
        with pytest.raises(ConfigError, match=said):
            read(file)
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no request"):
        read(file)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.jsonl")
