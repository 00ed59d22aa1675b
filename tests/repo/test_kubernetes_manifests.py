"""The manifests in deploy/kubernetes: strictly valid by Kubernetes' own schemas, and as the code has it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from zbmd.actors.bootstrap.environments import POD_PORT, Pod
from zbmd.actors.bootstrap.merge import Bootstrap, Role
from zbmd.tools.cli import launch
from zbmd.tools.cli.launch_settings import service, stated
from zbmd.tools.cli.settings import SETTINGS, merge
from zbmd.tools.node.cli import parser
from zbmd.transport.handshake.cookie import CookieError, load_or_create_cookie

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))

Manifest = dict[str, Any]


def documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


ALL = {
    f"{document['kind']}/{document['metadata']['name']}": document
    for path in FILES
    for document in documents(path)
}
PODS = {name: document for name, document in ALL.items() if document["kind"] in ("Job", "StatefulSet")}
every_pod = pytest.mark.parametrize("name", PODS)


def errors(document: Manifest) -> list[str]:
    """Return what the schema of its kind rejects."""
    schemas = json.loads((HERE / "kubernetes_schema.json").read_text())
    kind = schemas["kinds"][f"{document['apiVersion']} {document['kind']}"]
    schema = {"$schema": schemas["$schema"], "$defs": schemas["$defs"], "$ref": f"#/$defs/{kind}"}
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


def node_container(document: Manifest) -> Manifest:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return container


def bootstrap(document: Manifest, number: int) -> Bootstrap:
    """Return what the pod with this number reads from its environment."""
    host = f"{document['metadata']['name']}-{number}"
    fields = {
        "metadata.name": host if document["kind"] == "StatefulSet" else f"{host}-x7k2p",
        "metadata.namespace": "research",
        "status.podIP": f"10.1.0.{number + 1}",
    }
    environment = {
        each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in node_container(document)["env"]
    }
    if document["spec"].get("completionMode") == "Indexed":
        environment["JOB_COMPLETION_INDEX"] = str(number)
    command = node_container(document)["command"]
    assert command[0] == "zbmd-node"
    arguments = parser().parse_args(command[1:])
    settings = merge({s.name: getattr(arguments, s.name) for s in SETTINGS}, environment, None)
    return launch.bootstrap_of(environment, stated(settings), pod=Pod(host=host), service=service(settings))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_schemas_have_nothing_against_a_manifest(path: Path) -> None:
    for document in documents(path):
        assert not errors(document), document["kind"]


@pytest.mark.parametrize(
    ("name", "where", "value"),
    [
        ("Service/zbmd", ("spec", "ports", 0, "port"), "http"),
        ("Service/zbmd", ("spec", "publishNotReady"), True),
        ("StatefulSet/zbmd-serve", ("spec", "replicas"), "three"),
        ("Job/zbmd-train", ("spec", "template", "spec", "containers", 0, "comand"), []),
        ("Job/zbmd-train", ("spec", "template", "spec", "containers", 0, "name"), 7),
    ],
)
def test_the_schemas_refuse_what_is_planted(name: str, where: tuple[str | int, ...], value: object) -> None:
    broken: Any = json.loads(json.dumps(ALL[name]))
    inner = broken
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = value
    assert errors(broken)


@every_pod
def test_pods_found_and_join_one_cluster(name: str) -> None:
    document = PODS[name]
    count = document["spec"].get("completions") or document["spec"]["replicas"]
    found = [bootstrap(document, number) for number in range(count)]
    assert [each.role for each in found] == [Role.FOUND, *[Role.JOIN] * (count - 1)]
    assert {each.nodes.most for each in found} == {count}
    assert {each.port for each in found} == {POD_PORT}
    assert {each.join_addresses for each in found} == {found[0].join_addresses}
    first = f"{document['metadata']['name']}-0.zbmd.research.svc"
    assert [join_address.host for join_address in found[0].join_addresses] == [first, "zbmd.research.svc"]
    assert found[1].local == "10.1.0.2"


@every_pod
def test_a_pod_and_its_service_fit_together(name: str) -> None:
    document, headless = PODS[name], ALL["Service/zbmd"]
    template = document["spec"]["template"]
    assert headless["spec"]["clusterIP"] == "None" and headless["spec"]["publishNotReadyAddresses"] is True
    assert headless["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    domain = document["spec"].get("serviceName") or template["spec"]["subdomain"]
    assert domain == headless["metadata"]["name"]
    assert [port["containerPort"] for port in node_container(document)["ports"]] == [POD_PORT]
    assert headless["spec"]["ports"][0]["port"] == POD_PORT
    secrets = {v["secret"]["secretName"] for v in template["spec"]["volumes"] if "secret" in v}
    assert secrets == {ALL["Secret/zbmd-cookie"]["metadata"]["name"]}
    mounted = {
        mount["name"]
        for c in (node_container(document), *template["spec"]["initContainers"])
        for mount in c["volumeMounts"]
    }
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


@every_pod
def test_pods_run_with_no_more_rights_than_they_need(name: str) -> None:
    pod = PODS[name]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in (*pod["containers"], *pod["initContainers"]):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"]["limits"]["memory"]


def test_the_cookie_of_the_example_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cookie"
    file.write_text(ALL["Secret/zbmd-cookie"]["stringData"]["cookie"])
    file.chmod(0o600)
    with pytest.raises(CookieError, match="holds no cookie"):
        load_or_create_cookie(file)


def test_the_readme_names_every_manifest_and_commands_that_parse() -> None:
    text = (FOLDER / "README.md").read_text()
    for path in FILES:
        assert f"`{path.name}`" in text
    (command,) = [part for part in text.split("`") if part.startswith("kubectl exec")]
    words = shlex.split(command)
    assert parser().parse_args(words[words.index("zbmd-node") + 1 :]).explain
