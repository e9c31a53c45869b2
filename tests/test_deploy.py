"""Units and manifests under deploy/: flags exist, ports and names agree, tools accept them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from kvcourier.cli.app import app
from kvcourier.router.membership import parse_roster
from kvcourier.vllm_connector.settings import _KNOWN_KEYS

DEPLOY = Path(__file__).parents[1] / "deploy"
SYSTEMD, KUBERNETES = DEPLOY / "systemd", DEPLOY / "kubernetes"
UNITS = sorted(SYSTEMD.glob("*.service"))
DROP_INS = sorted(SYSTEMD.glob("*.service.d/*.conf"))
MANIFESTS = sorted(
    path
    for folder in ("base", "components/monitoring")
    for path in (KUBERNETES / folder).glob("*.yaml")
    if path.name != "kustomization.yaml"
)
ROSTERS = sorted(DEPLOY.rglob("instances.toml"))
HTTP = {"prefill": 8100, "decode": 8200, "router": 8192}
SIDE_CHANNEL = 5600
EXAMPLES = {
    "POD_NAME": "decode-0",
    "MODEL": "m",
    "TP_SIZE": "1",
    "ENGINE_ID": "e",
    "KVCOURIER_URL": "http://127.0.0.1:1",
    "KVCOURIER_ROUTER": "http://127.0.0.1:2",
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))")


def expand(text: str) -> str:
    """With a value for each variable, which must be one that the files set."""
    return _VARIABLE.sub(lambda m: EXAMPLES[m[1] or m[2] or m[3]], text)


def documents() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from (each for each in yaml.safe_load_all(path.read_text()) if each)


OBJECTS = {(each["kind"], each["metadata"]["name"]): each for each in documents()}
WORKLOADS = {
    name: each for (kind, name), each in OBJECTS.items() if kind in ("StatefulSet", "Deployment")
}


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = WORKLOADS[name]["spec"]["template"]
    return spec


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["spec"]["containers"]
    return dict(only)


def hooks(name: str) -> dict[str, str]:
    return {
        hook: each["exec"]["command"][-1] for hook, each in container(name)["lifecycle"].items()
    }


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every command line of `kvcourier` in the files, and where it is."""
    for path in (*UNITS, *DROP_INS):
        for line in path.read_text().splitlines():
            key, _, value = line.partition("=")
            if key.startswith("Exec") and "/kvcourier " in value:
                yield f"{path.name}: {key}", shlex.split(expand(value.lstrip("-")))[1:]
    for name in WORKLOADS:
        for hook, script in hooks(name).items():
            words = shlex.split(expand(script).split("||")[0])
            yield f"{name}: {hook}", words[words.index("kvcourier") + 1 :]
    yield "router: args", [expand(each) for each in container("router")["args"]]


def here(argument: str, tmp_path: Path) -> str:
    """Files of a node, where they are in this repository; keys are made up."""
    flag, _, value = argument.rpartition("=")
    path = Path(value)
    if not value.startswith("/etc/kvcourier/"):
        return argument
    found = SYSTEMD / path.name
    if path.suffix == ".toml" and not found.exists():
        found = SYSTEMD / f"kvcourier-{path.name}"
    if path.suffix != ".toml":
        found = tmp_path / path.name
        found.write_text("key\n")
    return f"{flag}={found}" if flag else str(found)


COMMAND_LINES = list(command_lines())


@pytest.mark.parametrize(("where", "words"), COMMAND_LINES, ids=[each for each, _ in COMMAND_LINES])
def test_every_command_line_is_one_that_kvcourier_understands(
    where: str, words: list[str], tmp_path: Path
) -> None:
    """Parsed by the command itself, with its configuration file: names, types and choices."""
    group = typer.main.get_command(app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    parent = click.Context(group, info_name="kvcourier")
    arguments = [here(each, tmp_path) for each in words[1:]]
    with command.make_context(words[0], arguments, parent=parent) as context:
        assert context.params


def test_the_files_hold_the_command_lines_that_we_look_for() -> None:
    places = [where for where, _ in COMMAND_LINES]
    assert len(places) >= 15
    for name in WORKLOADS:
        assert f"{name}: preStop" in places
    assert sum("ExecStop" in each for each in places) == len(UNITS) + len(DROP_INS)


@pytest.mark.parametrize("path", ROSTERS, ids=[str(each.relative_to(DEPLOY)) for each in ROSTERS])
def test_routers_understand_the_instances_and_their_ports_agree(path: Path) -> None:
    roster = parse_roster(path.read_text())
    for leg, specs in roster.items():
        assert specs
        for spec in specs:
            assert spec.url.endswith(f":{HTTP[leg]}")
            if spec.coordinates is not None:
                assert spec.coordinates.port == SIDE_CHANNEL
                # The name of the pod is the engine id, and the host's first part.
                assert spec.coordinates.host.startswith(spec.coordinates.engine_id)
                assert spec.url.startswith(f"http://{spec.coordinates.host}:")


def overlay_instances(path: Path, leg: str) -> int:
    return len(tomllib.loads(path.read_text())[leg])


def test_there_is_a_line_for_every_pod() -> None:
    base, overlay = KUBERNETES / "base", KUBERNETES / "overlays/2p2d"
    replicas = yaml.safe_load((overlay / "kustomization.yaml").read_text())["replicas"]
    for each in replicas:
        listed = overlay_instances(overlay / "instances.toml", each["name"])
        assert listed == each["count"]
        in_base = overlay_instances(base / "instances.toml", each["name"])
        assert in_base == WORKLOADS[each["name"]]["spec"]["replicas"]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_ports_and_names_agree_within_the_manifests(name: str) -> None:
    one = container(name)
    ports = {each["name"]: each["containerPort"] for each in one["ports"]}
    assert ports["http"] == HTTP[name]
    assert f"--port={HTTP[name]}" in one["args"]
    labels = pod(name)["metadata"]["labels"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in one:
            assert one[probe]["httpGet"]["port"] == "http"
    services = [each for (kind, _), each in OBJECTS.items() if kind == "Service"]
    for service in services:
        if service["spec"]["selector"].items() <= labels.items():
            for port in service["spec"]["ports"]:
                assert port["port"] == ports[port["targetPort"]]
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        selector = "podSelector" if kind == "NetworkPolicy" else "selector"
        chosen = OBJECTS[kind, name]["spec"][selector]["matchLabels"]
        assert chosen == labels == WORKLOADS[name]["spec"]["selector"]["matchLabels"]


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_instance_is_named_and_reached_as_routers_have_it(name: str) -> None:
    """By the headless Service: POD.SERVICE, and so its drain names it."""
    assert WORKLOADS[name]["spec"]["serviceName"] == name
    assert OBJECTS["Service", name]["spec"]["clusterIP"] == "None"
    for script in hooks(name).values():
        assert f"http://$POD_NAME.{name}:{HTTP[name]}" in script
        (service, port) = re.findall(r"--router=http://([\w-]+):(\d+)", script)[0]
        routers = OBJECTS["Service", service]["spec"]
        # A Service with one address of its own would pass the call on to one router only.
        assert routers["clusterIP"] == "None"
        assert routers["ports"][0]["port"] == int(port)
    environment = {each["name"]: each for each in container(name)["env"]}
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"] == str(SIDE_CHANNEL)


def policy_ports(policy: str, component: str) -> list[Mapping[str, Any]]:
    rules = OBJECTS["NetworkPolicy", policy]["spec"]["ingress"]
    return [
        port
        for rule in rules
        for peer in rule.get("from", [{}])
        if not peer or component in str(peer)
        for port in rule["ports"]
    ]


def test_the_network_policies_let_through_what_is_needed_and_no_more() -> None:
    for name, other in (("prefill", "decode"), ("decode", "prefill")):
        (http,) = policy_ports(name, "router")
        assert http["port"] == HTTP[name]
        (any_port,) = policy_ports(name, other)
        assert any_port["port"] <= SIDE_CHANNEL <= any_port["endPort"]
    (clients,) = policy_ports("router", "prefill")
    assert clients["port"] == HTTP["router"]
    assert {each["port"] for each in policy_ports("metrics", "monitoring")} == set(HTTP.values())


def number_after(flag: str, words: str) -> int:
    return int(re.findall(rf"{flag}[= ](\d+)", words)[0])


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_pod_has_time_to_drain(name: str) -> None:
    needed = number_after("--timeout", hooks(name)["preStop"])
    arguments = " ".join(container(name)["args"])
    needed += number_after("--shutdown-timeout", arguments) if name != "router" else 10
    assert needed < pod(name)["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("path", [*UNITS, *DROP_INS], ids=lambda path: str(path.name))
def test_a_unit_has_time_to_drain(path: Path) -> None:
    text = path.read_text()
    stop = next(line for line in reversed(text.splitlines()) if line.startswith("ExecStop="))
    limit = re.findall(r"TimeoutStopSec=(\d+)", text) or re.findall(
        r"TimeoutStopSec=(\d+)", (SYSTEMD / path.parent.name.removesuffix(".d")).read_text()
    )
    if "--timeout" in stop:
        drain = number_after("--timeout", stop) + number_after("--shutdown-timeout", text)
    else:
        drain = tomllib.loads(path.with_suffix(".toml").read_text())["drain"]["timeout"]
    assert drain < int(limit[0])


def transfer_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    texts = [*KUBERNETES.rglob("*.yaml"), *DROP_INS]
    for path in texts:
        for found in re.findall(r"--kv-transfer-config[= ]'?(\{.*\})'?$", path.read_text(), re.M):
            yield f"{path.relative_to(DEPLOY)}", json.loads(expand(found))


CONFIGS = list(transfer_configs())


@pytest.mark.parametrize(("where", "config"), CONFIGS, ids=[where for where, _ in CONFIGS])
def test_vllm_is_told_of_our_connector_in_keys_that_it_reads(
    where: str, config: dict[str, Any]
) -> None:
    assert config["kv_connector"] == "CourierConnector"
    assert config["kv_connector_module_path"] == "kvcourier.vllm_connector"
    assert config["kv_role"] == ("kv_producer" if "prefill" in where else "kv_consumer")
    assert config["engine_id"] in (EXAMPLES["POD_NAME"], EXAMPLES["ENGINE_ID"])
    assert set(config.get("kv_connector_extra_config", {})) <= _KNOWN_KEYS


def test_both_ways_to_run_vllm_and_the_keys_were_looked_at() -> None:
    assert len(CONFIGS) == 6


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_units_files_agree_on_the_port(role: str) -> None:
    unit = (SYSTEMD / f"kvcourier-{role}.service").read_text()
    assert f"KVCOURIER_URL=http://127.0.0.1:{HTTP[role]}" in unit
    settings = tomllib.loads((SYSTEMD / f"kvcourier-{role}.toml").read_text())
    assert settings["serve"]["port"] == HTTP[role]
    assert (
        f"--port {HTTP[role]} " in (SYSTEMD / f"kvcourier-{role}.service.d/vllm.conf").read_text()
    )
    assert f":{HTTP[role]}\n" in (SYSTEMD / f"kvcourier-{role}.env").read_text()


# The tools that read such files, where they are.


def tool(name: str) -> str:
    """Where it is, by KVCOURIER_<NAME> or on the path."""
    variable = f"KVCOURIER_{name.upper().replace('-', '_')}"
    found = os.environ.get(variable) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: put it on the path, or name it by {variable}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", UNITS, ids=lambda path: str(path.stem))
@pytest.mark.parametrize("with_drop_in", [False, True], ids=["as it is", "vLLM"])
def test_systemd_accepts_the_units(path: Path, with_drop_in: bool, tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    drop_in = path.with_name(f"{path.name}.d")
    if with_drop_in and not drop_in.is_dir():
        pytest.skip("vLLM takes the place of instances only")
    copy = tmp_path / path.name
    # What it starts is not installed here, and would be missed.
    real = re.compile(r"/opt/\w+/bin/\w+")
    copy.write_text(real.sub("/bin/true", path.read_text()))
    if with_drop_in:
        (tmp_path / drop_in.name).mkdir()
        for each in drop_in.iterdir():
            (tmp_path / drop_in.name / each.name).write_text(
                real.sub("/bin/true", each.read_text())
            )
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    ours = [line for line in done.stderr.splitlines() if path.name in line or "vllm.conf" in line]
    assert done.returncode == 0 and not ours, done.stderr


OVERLAYS = ["base", "overlays/2p2d"]


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_builds_what_kubernetes_accepts(overlay: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(KUBERNETES / overlay)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    built = {(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(done.stdout)}
    assert built >= {
        ("StatefulSet", "prefill"),
        ("StatefulSet", "decode"),
        ("Deployment", "router"),
    }
    (tmp_path / "built.yaml").write_text(done.stdout)
    checked = subprocess.run(
        [tool("kubernetes-validate"), "--strict", str(tmp_path / "built.yaml")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
