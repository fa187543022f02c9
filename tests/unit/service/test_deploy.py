"""The examples for Slurm and Kubernetes, as far as they can be checked without either."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import yaml

from polar_gym.config.loading import load_config
from polar_gym.gateway.node.settings import GatewaySettings, gateway_settings
from polar_gym.paths import shipped_dir
from polar_gym.service.settings import split_settings

DEPLOY = shipped_dir("recipes") / "deploy"


def check_gateway(arguments: list[str]) -> GatewaySettings:
    """What `polar-gym gateway` makes of them."""
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


def test_the_slurm_example_is_a_script_that_gives_settings_that_exist() -> None:
    script = DEPLOY / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""
    text = script.read_text()
    assert text.splitlines()[0] == "#!/bin/bash"
    plain = re.sub(r"\$\([^)]*\)|\$\{?\w+\}?", "x", text.replace('"${@:3}"', "").replace("\\\n", " "))
    (server,) = re.findall(r"polar-gym serve ([^']*)'", plain)
    own, others = split_settings(server.replace('"', "").split())
    assert (own.cluster.name, own.port, others) == ("none", 8700, [])
    (gateway,) = re.findall(r"again polar-gym gateway ([^\n]*)\n", plain)
    settings = check_gateway(
        [argument.strip('"') for argument in gateway.replace("server=x", "server=http://x").split()]
    )
    assert (settings.port, settings.url) == (8701, "http://x:8701")
