"""The examples for Slurm and Kubernetes, with stand-ins for Slurm's programs and without a Kubernetes cluster."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from polar_gym.config.loading import load_config
from polar_gym.gateway.node.settings import GatewaySettings, gateway_settings
from polar_gym.paths import shipped_dir
from polar_gym.service.settings import split_settings

DEPLOY = shipped_dir("recipes") / "deploy"
Slurm = Callable[..., tuple[list[str], list[str]]]


def check_gateway(arguments: list[str]) -> GatewaySettings:
    """Return the settings that `polar-gym gateway` reads from its arguments. The rest must make a config."""
    values = dict(argument.split("=", 1) for argument in arguments)
    own = {key: value for key, value in values.items() if key in GatewaySettings.model_fields}
    load_config(None, [f"{key}={value}" for key, value in values.items() if key not in own])
    return gateway_settings(own)


def test_the_kubernetes_example_gives_settings_that_exist() -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    services = {document["metadata"]["name"]: document for document in documents if document["kind"] == "Service"}
    pods = {
        document["metadata"]["name"]: document["spec"]["template"]
        for document in documents
        if document["kind"] == "StatefulSet"
    }
    assert {name: service["spec"]["selector"] for name, service in services.items()} == {
        name: pod["metadata"]["labels"] for name, pod in pods.items()
    }
    (server,), (gateway,) = (pods[name]["spec"]["containers"] for name in ("polar-server", "polar-gateway"))
    own, others = split_settings(server["args"][1:])
    assert (server["args"][0], own.port, own.cluster.name, others) == ("serve", 8700, "none", [])
    known = {variable["name"]: "10.0.0.7" for variable in gateway["env"]}
    filled = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], argument) for argument in gateway["args"]]
    settings = check_gateway(filled[1:])
    assert (gateway["args"][0], settings.port, settings.url) == ("gateway", 8701, "http://10.0.0.7:8701")
    assert settings.server == f"http://polar-server:{services['polar-server']['spec']['ports'][0]['port']}"
    for container, port in ((server, 8700), (gateway, 8701)):
        assert container["livenessProbe"]["httpGet"]["port"] == port
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        files = [entry["value"] for entry in container["env"] if entry["name"].endswith("_FILE")]
        assert all(any(file.startswith(f"{path}/") for path in mounted) for file in files)


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
POLAR_GYM = """#!/bin/bash
echo "$POLAR_GYM_SERVICE_KEY_FILE $POLAR_GYM_NODE_KEY_FILE" >>"$RECORDS/keys.$1"
printf '%s\\n' "$@" >>"$RECORDS/arguments.$1"
read -r status < <(sed -n "$(wc -l <"$RECORDS/keys.$1")p" "$RECORDS/statuses.$1")
exit "${status:-0}"
"""
STUBS = {
    "scontrol": "#!/bin/bash\necho one\nseq 100000\n",  # more than a pipe holds: a reader that stops early ends it
    "hostname": "#!/bin/bash\necho worker\n",
    "sleep": "#!/bin/bash\n",
    "srun": SRUN,
    "polar-gym": POLAR_GYM,
}


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Run the Slurm example with stand-ins for Slurm's programs and polar-gym, which record their arguments."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in STUBS.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)

    def run(*settings: str, server: str = "", gateway: str = "") -> tuple[list[str], list[str]]:
        """Return the arguments that the server and the gateway got, where they end with these statuses in turn."""
        (tmp_path / "statuses.serve").write_text(server)
        (tmp_path / "statuses.gateway").write_text(gateway)
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": "/home/user",
            "RECORDS": str(tmp_path),
            "SLURM_JOB_NODELIST": "nodes[1-2]",
        }
        script = [DEPLOY / "slurm.sh", *settings]
        subprocess.run(["bash", *script], env=environment, check=True, capture_output=True, timeout=60)
        served, routed = ((tmp_path / f"arguments.{name}").read_text().splitlines() for name in ("serve", "gateway"))
        return served, routed

    return run


def test_the_slurm_example_starts_a_server_and_gateways_with_settings_that_exist(slurm: Slurm, tmp_path: Path) -> None:
    server, gateway = slurm("engine=vllm", "engine.url=http://inference:8000", "pools.run=16")
    own, others = split_settings(server[1:])
    assert (server[0], own.cluster.name, own.port, str(own.state), others) == (
        "serve",
        "none",
        8700,
        "/home/user/.polar-gym/state/server",
        [],
    )
    settings = check_gateway(gateway[1:])
    assert (gateway[0], settings.port, settings.url, settings.server) == (
        "gateway",
        8701,
        "http://worker:8701",
        "http://one:8700",
    )
    assert (settings.name, str(settings.state)) == ("worker", "/home/user/.polar-gym/state/worker")
    assert gateway[-3:] == ["engine=vllm", "engine.url=http://inference:8000", "pools.run=16"]
    keys = "/home/user/.polar-gym/service.key /home/user/.polar-gym/node.key\n"
    assert [(tmp_path / f"keys.{name}").read_text() for name in ("serve", "gateway")] == [keys, keys]


def test_the_slurm_example_starts_again_what_dies_and_not_what_has_a_wrong_setting(
    slurm: Slurm, tmp_path: Path
) -> None:
    slurm("engine=vllm", server="1\n137\n0\n", gateway="2\n0\n")
    runs = {name: (tmp_path / f"keys.{name}").read_text().count("\n") for name in ("serve", "gateway")}
    assert runs == {"serve": 3, "gateway": 1}


def test_the_slurm_example_asks_slurm_for_one_task_on_each_machine() -> None:
    """Slurm takes the options from comments before the first command."""
    lines = (DEPLOY / "slurm.sh").read_text().splitlines()
    comments = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --ntasks-per-node=1" in comments
