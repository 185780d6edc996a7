"""Every supported shape is linted, rendered and validated strictly, on the two major versions of Helm."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from auditor.config import Config as AuditorConfig
from deploy.chart_schema import CHARTS_OWN, SCHEMA, schema_text
from services.config import build_config
from tests.deploy.crds.reduce import SCHEMAS, lines, reduced

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "helm" / "rl-kernel"
SHAPES = sorted(path.stem for path in (CHART / "shapes").glob("*.yaml"))
HELMS = [version for version in ("3", "4") if (REPOSITORY / f"build/tools/helm-{version}/helm").exists()]
# A folder with the CRDs of KubeRay and prometheus-operator, as those projects publish them.
CRDS = Path(os.environ["CRDS"]) if os.environ.get("CRDS") else None
KUBERNETES = "1.32"

pytestmark = pytest.mark.skipif(not HELMS, reason="helm is missing: make ops-tools")


def helm(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(REPOSITORY / f"build/tools/helm-{version}/helm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def rendered(version: str, shape: str, *extra: str) -> list[dict[str, Any]]:
    done = template(version, shape, *extra)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]


@cache
def template(version: str, shape: str, *extra: str) -> subprocess.CompletedProcess[str]:
    """Asked for once: the chart does not change while it is tested."""
    file = str(CHART / f"shapes/{shape}.yaml")
    return helm(version, "template", "rl", str(CHART), "-n", "rl-system", "-f", file, *extra)


def templated(shape: str, *settings: str) -> subprocess.CompletedProcess[str]:
    return template(HELMS[-1], shape, *(word for setting in settings for word in ("--set", setting)))


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [document for document in documents if document["kind"] == kind]
    assert len(found) == 1, [document["metadata"]["name"] for document in found]
    return found[0]


@pytest.mark.parametrize("version", HELMS)
def test_the_versions_are_those_that_the_chart_is_for(version: str) -> None:
    assert helm(version, "version", "--short").stdout.startswith({"3": "v3.17.", "4": "v4."}[version])


@pytest.mark.parametrize("version", HELMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_passes_strict_lint(version: str, shape: str) -> None:
    linted = helm(version, "lint", "--strict", str(CHART), "-f", str(CHART / f"shapes/{shape}.yaml"))
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("shape", SHAPES)
def test_both_versions_of_helm_render_the_same(shape: str) -> None:
    first, *others = [rendered(version, shape) for version in HELMS]
    assert all(sorted(map(str, other)) == sorted(map(str, first)) for other in others)


@pytest.mark.parametrize("shape", SHAPES)
def test_core_kinds_are_valid_without_one_unknown_field(shape: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing").validate
    for document in rendered(HELMS[-1], shape):
        if "." in document["apiVersion"].partition("/")[0] and not document["apiVersion"].endswith("k8s.io/v1"):
            continue
        validate(document, KUBERNETES, strict=True)


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused where it lists the known ones."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    known = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if known and "additionalProperties" not in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
        closed["additionalProperties"] = False
    return closed


def crd_schemas() -> dict[tuple[str, str], Any]:
    """Strict schema by apiVersion and kind."""
    reduced = strict(json.loads(SCHEMAS.read_text()))
    schemas = {}
    for name, schema in reduced["kinds"].items():
        version, kind = name.split(" ")
        schemas[version, kind] = {**schema, "$defs": reduced["$defs"]}
    return schemas


def faults(document: dict[str, Any], schemas: dict[tuple[str, str], Any]) -> list[str]:
    """What its own definition has against a custom resource."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is missing")
    schema = schemas[document["apiVersion"], document["kind"]]
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


def test_custom_resources_are_valid_by_their_own_definitions() -> None:
    schemas = crd_schemas()
    seen = set()
    for shape in SHAPES:
        for document in rendered(HELMS[-1], shape):
            if (document["apiVersion"], document["kind"]) in schemas:
                seen.add(document["kind"])
                assert faults(document, schemas) == []
    assert seen == {"RayJob", "RayCluster", "ServiceMonitor", "PodMonitor", "PrometheusRule"}


@pytest.mark.parametrize(
    ("kind", "place", "value", "said"),
    [
        ("RayJob", "rayClusterSpec.headGroupSpec.rayStartParam", {}, "rayStartParam"),
        ("RayJob", "rayClusterSpec.headGroupSpec.template.spec.containers.0.resorces", {}, "resorces"),
        ("RayJob", "backoffLimit", "none", "'none' is not of type 'integer'"),
        ("RayJob", "rayClusterSpec.authOptions.mode", "tokens", "'tokens' is not one of"),
        ("ServiceMonitor", "endpoints.0.intervall", "15s", "intervall"),
        ("ServiceMonitor", "endpoints.0.interval", "15", "does not match"),
        ("PodMonitor", "podMetricsEndpoints.0.relabelings.0.targetlabel", "x", "targetlabel"),
        ("PrometheusRule", "groups.0.rules.0.form", "5m", "form"),
    ],
)
def test_a_misspelt_field_or_a_wrong_value_of_a_custom_resource_is_found(
    kind: str, place: str, value: Any, said: str
) -> None:
    document = one(rendered(HELMS[-1], "rayjob-cuda"), kind)
    *path, last = place.split(".")
    part = document["spec"]
    for step in path:
        part = part[int(step)] if step.isdigit() else part[step]
    part[last] = value
    assert any(said in fault for fault in faults(document, crd_schemas()))


@pytest.mark.skipif(CRDS is None, reason="CRDS names no folder of the projects' own definitions to hold the file to")
def test_the_schemas_in_this_repository_are_those_of_the_definitions() -> None:
    assert CRDS is not None
    assert SCHEMAS.read_text() == lines(reduced(CRDS)), "run `python -m tests.deploy.crds.reduce $CRDS`"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_configs_in_the_chart_are_ones_that_the_programs_accept(shape: str) -> None:
    for document in rendered(HELMS[-1], shape):
        if document["kind"] != "ConfigMap":
            continue
        for name, text in document["data"].items():
            if name == "auditor.yaml":
                AuditorConfig.model_validate(yaml.safe_load(text))
            if name == "job.yaml":
                build_config(yaml.safe_load(text), source=shape)


def test_the_auditor_runs_as_nobody_on_a_root_that_it_cannot_write() -> None:
    pod = one(rendered(HELMS[-1], "auditor"), "StatefulSet")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == {
        "/var/lib/auditor",
        "/tmp",
    }


def test_an_auditor_whose_pod_has_no_ipv4_can_listen_on_ipv6() -> None:
    documents = list(yaml.safe_load_all(templated("minimal", "auditor.listen=[::]").stdout))
    config = AuditorConfig.model_validate(yaml.safe_load(one(documents, "ConfigMap")["data"]["auditor.yaml"]))
    assert (config.grpc, config.http) == ("[::]:50051", "[::]:9464")


def test_with_postgresql_the_password_is_in_no_configmap_and_the_ledger_in_no_claim() -> None:
    documents = rendered(HELMS[-1], "auditor-postgres")
    statefulset = one(documents, "StatefulSet")
    assert "volumeClaimTemplates" not in statefulset["spec"]
    (container,) = statefulset["spec"]["template"]["spec"]["containers"]
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "auditor-postgres", "key": "password"}
    config = AuditorConfig.model_validate(yaml.safe_load(one(documents, "ConfigMap")["data"]["auditor.yaml"]))
    assert config.ledger == "postgresql://auditor@postgres.db.svc:5432/auditor"
    assert config.tls_client_ca == Path("/run/secrets/tls/ca.crt")
    assert "tcpSocket" in container["readinessProbe"]


def test_a_job_beside_an_auditor_with_certificates_needs_its_authority_and_speaks_https() -> None:
    shape = str(CHART / "shapes/rayjob-cuda.yaml")
    settings = ["monitoring.serviceMonitor.tlsConfig.serverName=a", "auditor.tls.existingSecret=x"]
    settings += ["auditor.tls.clientCertificates=true", "job.tls.existingSecret=y"]
    for given, complaint in ((2, "job.tls.existingSecret"), (4, "job.tls.clientCertificate")):
        flags = [word for setting in settings[:given] for word in ("--set", setting)]
        done = helm(HELMS[-1], "template", "rl", str(CHART), "-f", shape, *flags)
        assert done.returncode != 0
        assert complaint in done.stderr
    flags = [word for setting in (*settings, "job.tls.clientCertificate=true") for word in ("--set", setting)]
    texts = [
        d["data"]["job.yaml"] for d in rendered(HELMS[-1], "rayjob-cuda", *flags) if "job.yaml" in d.get("data", {})
    ]
    auditor = build_config(yaml.safe_load(texts[0]), source="chart").auditor
    assert auditor.http.startswith("https://")
    assert auditor.tls_ca == "/run/secrets/auditor-tls/ca.crt"
    assert auditor.tls_key == "/run/secrets/auditor-tls/tls.key"


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
@pytest.mark.parametrize(("maker", "resource"), [("cuda", "nvidia.com/gpu"), ("rocm", "amd.com/gpu")])
def test_workers_ask_for_the_gpus_of_their_maker_and_the_head_for_none(kind: str, maker: str, resource: str) -> None:
    documents = rendered(HELMS[-1], f"{kind}-{maker}")
    spec = one(documents, "RayCluster")["spec"] if kind == "raycluster" else one(documents, "RayJob")["spec"]
    spec = spec.get("rayClusterSpec", spec)
    head = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    pod = spec["workerGroupSpecs"][0]["template"]["spec"]
    (worker,) = pod["containers"]
    assert worker["resources"]["limits"][resource] in ("4", "8")
    assert worker["image"].startswith(f"rl-kernel-job-{maker}:")
    assert all(name.partition(".")[0] == resource.partition(".")[0] for name in pod.get("nodeSelector", {}))
    assert not any("gpu" in name for name in head["resources"]["limits"])
    assert spec["authOptions"] == {"mode": "token"}
    assert {port["name"] for port in head["ports"]} >= {"metrics", "as-metrics", "dash-metrics"}


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("ray")])
def test_rays_dashboard_is_told_where_grafana_is_and_prometheus_where_rays_metrics_are(shape: str) -> None:
    documents = rendered(HELMS[-1], shape)
    spec = next(d["spec"] for d in documents if d["kind"] in ("RayJob", "RayCluster"))
    head = spec.get("rayClusterSpec", spec)["headGroupSpec"]["template"]
    environment = {each["name"]: each["value"] for each in head["spec"]["containers"][0]["env"]}
    assert environment["RAY_GRAFANA_HOST"] == "http://grafana.monitoring.svc:3000"
    # What the browser opens: the address above is known inside the cluster only.
    assert environment["RAY_GRAFANA_IFRAME_HOST"] == "https://grafana.example.com"
    assert environment["RAY_PROMETHEUS_HOST"] == "http://prometheus.monitoring.svc:9090"
    monitor = one(documents, "PodMonitor")["spec"]
    ports = {port["name"] for port in head["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == {
        "metrics",
        "as-metrics",
        "dash-metrics",
    }
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
    assert monitor["selector"]["matchLabels"].items() <= head["metadata"]["labels"].items()


def test_every_job_has_a_token_of_its_own_and_the_auditor_the_list_of_them() -> None:
    documents = rendered(HELMS[-1], "rayjob-cuda")
    auditor = one(documents, "StatefulSet")["spec"]["template"]["spec"]
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in auditor["volumes"] if "secret" in volume}
    assert secrets == {"token": "auditor-token", "job-tokens": "auditor-jobs"}
    mounts = {mount["name"]: mount["mountPath"] for mount in auditor["containers"][0]["volumeMounts"]}
    texts = {name: text for d in documents if d["kind"] == "ConfigMap" for name, text in d["data"].items()}
    assert yaml.safe_load(texts["auditor.yaml"])["tokens_file"] == f"{mounts['job-tokens']}/tokens.yaml"
    pod = one(documents, "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    carried = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert carried == ["policy-token"], "a job must not hold the token that opens every run"
    (place,) = [m["mountPath"] for m in pod["containers"][0]["volumeMounts"] if m["name"] == "auditor-token"]
    assert yaml.safe_load(texts["job.yaml"])["auditor"]["token_file"] == f"{place}/token"
    assert yaml.safe_load(texts["job.yaml"])["run"]["name"] == "policy"
    shared = one(rendered(HELMS[-1], "rayjob-rocm"), "RayJob")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    carried = [volume["secret"]["secretName"] for volume in shared["spec"]["volumes"] if "secret" in volume]
    assert carried == ["auditor-token"]


def test_the_rules_in_the_chart_are_the_rules_that_are_tested() -> None:
    rule = one(rendered(HELMS[-1], "auditor"), "PrometheusRule")
    text = (REPOSITORY / "deploy/prometheus/rules.yml").read_text()
    based = text.replace("runbook_url: docs/", "runbook_url: https://example.com/rl-kernel/docs/")
    assert rule["spec"] == yaml.safe_load(based)
    links = [r["annotations"]["runbook_url"] for g in rule["spec"]["groups"] for r in g["rules"] if "alert" in r]
    assert all(link.startswith("https://example.com/rl-kernel/docs/operations/alerts.md#") for link in links)


def test_every_dashboard_is_in_the_chart() -> None:
    maps = [
        d for d in rendered(HELMS[-1], "auditor") if d["kind"] == "ConfigMap" and "dashboard" in d["metadata"]["name"]
    ]
    given = {name.removeprefix("rlk-"): text for m in maps for name, text in m["data"].items()}
    folder = REPOSITORY / "deploy/grafana/dashboards"
    assert given.keys() == {file.name for file in folder.glob("*.json")}
    for name, text in given.items():
        assert text.strip() == (folder / name).read_text().strip()


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("auditor.token.insecure=false", "auditor.token.existingSecret is empty"),
        ("auditor.tokn.insecure=true", "tokn"),
        ("job.kind=deployment", "kind"),
        ("job.accelerator=tpu", "accelerator"),
        ("auditor.config.ledger=elsewhere.db", "ledger"),
        ("auditor.tls.clientCertificates=true", "auditor.tls.existingSecret"),
        ("auditor.postgres.url=postgresql://me:secret@db/x", "url"),
        ("auditor.persistence.size=lots", "size"),
        ("job.workers.gpus=0", "gpus"),
        ("monitoring.prometheusRule.runbookBase=docs", "runbookBase"),
        ("auditor.config.recompute_rat=0.1", "recompute_rat"),
        ("auditor.config.recompute_workers=0", "recompute_workers"),
        ("auditor.config.retain_days=long", "retain_days"),
        ("auditor.config.stop_at_eof=true", "stop_at_eof"),
        ("job.config.run.name=no spaces", "name"),
        ("job.grafanaIframeHost=grafana:3000", "grafanaIframeHost"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_by_name(setting: str, complaint: str) -> None:
    for version in HELMS:
        refused = helm(
            version, "template", "rl", str(CHART), "-f", str(CHART / "shapes/minimal.yaml"), "--set", setting
        )
        assert refused.returncode != 0
        assert complaint in refused.stderr


def test_the_schema_has_every_setting_of_the_auditor_as_the_auditor_has_it() -> None:
    assert SCHEMA.read_text() == schema_text(), "run `python -m deploy.chart_schema`"
    config = json.loads(SCHEMA.read_text())["properties"]["auditor"]["properties"]["config"]
    assert config["properties"].keys() | set(CHARTS_OWN) == AuditorConfig.model_fields.keys()
    assert not config["properties"].keys() & set(CHARTS_OWN)


@pytest.mark.parametrize("setting", ["recompute_rate=0.5", "retain_days=30", "recompute_idle=true", "archive=/archive"])
def test_the_auditors_own_settings_pass_through_the_schema(setting: str) -> None:
    documents = rendered(HELMS[-1], "minimal", "--set", f"auditor.config.{setting}")
    config = AuditorConfig.model_validate(yaml.safe_load(one(documents, "ConfigMap")["data"]["auditor.yaml"]))
    name, _, value = setting.partition("=")
    assert str(getattr(config, name)) in (value, f"{value}.0", value.title())


def test_the_packaged_chart_carries_the_rules_and_dashboards_themselves(tmp_path: Path) -> None:
    packaged = helm(HELMS[-1], "package", str(CHART), "-d", str(tmp_path))
    assert packaged.returncode == 0, packaged.stderr
    (archive,) = tmp_path.glob("*.tgz")
    shape = CHART / "shapes/auditor.yaml"
    from_archive = helm(HELMS[-1], "template", "rl", str(archive), "-n", "rl-system", "-f", str(shape))
    documents = [document for document in yaml.safe_load_all(from_archive.stdout) if document]
    assert sorted(map(str, documents)) == sorted(map(str, rendered(HELMS[-1], "auditor")))
