"""What is installed works together: pods share what they must, are let in, and what could not work is refused."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from auditor.config import Config as AuditorConfig
from auditor.weights_place import LocalWeights
from services.config import Weights, build_config
from services.job import weights_root
from services.run_folder import RunFolder
from tests.deploy.test_helm import CHART, HELMS, KUBERNETES, REPOSITORY, SHAPES, helm, one, rendered, templated

pytestmark = pytest.mark.skipif(not HELMS, reason="helm is missing: make ops-tools")


def job_pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pod specs of the head and of the workers."""
    spec = next(d["spec"] for d in documents if d["kind"] in ("RayJob", "RayCluster"))
    spec = spec.get("rayClusterSpec", spec)
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def claims(pod: dict[str, Any]) -> dict[str, str]:
    """Claim by the path at which the pod's first container sees it."""
    names = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    return {m["mountPath"]: names[m["name"]] for m in pod["containers"][0]["volumeMounts"] if m["name"] in names}


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("ray")])
def test_head_and_workers_share_the_claims_that_hold_weights_and_runs(shape: str) -> None:
    documents = rendered(HELMS[-1], shape)
    head, *workers = job_pods(documents)
    assert claims(head) == {"/weights": "rl-weights", "/runs": "rl-runs"}
    assert all(claims(worker) == claims(head) for worker in workers)
    (text,) = [d["data"]["job.yaml"] for d in documents if "job.yaml" in d.get("data", {})]
    config = build_config(yaml.safe_load(text), source=shape)
    assert (config.weights.directory, config.run.directory) == ("/weights", "/runs")


def test_the_auditor_finds_the_weights_of_a_job_of_the_chart(tmp_path: Path) -> None:
    documents = rendered(HELMS[-1], "rayjob-cuda")
    texts = {name: text for d in documents if d["kind"] == "ConfigMap" for name, text in d["data"].items()}
    root = AuditorConfig.model_validate(yaml.safe_load(texts["auditor.yaml"])).weights_root
    config = build_config(yaml.safe_load(texts["job.yaml"]), source="chart")
    # The claim, at another place.
    assert root == "/weights"
    below = Path(config.weights.directory).relative_to(root)
    published = weights_root(
        config.model_copy(update={"weights": Weights(directory=str(tmp_path / below))}),
        RunFolder(tmp_path / "runs" / "policy.1"),
    )
    (published / "v000007").mkdir(parents=True)
    (published / "v000007/manifest.json").write_text(json.dumps({"weight_version": 7, "weight_digest": "ab" * 32}))
    assert LocalWeights(tmp_path).folder(7, "ab" * 32) == published / "v000007"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("weights.existingClaim=", "job.runsClaim="), "weights.existingClaim"),
        (("job.config.weights.directory=/data",), "job.config.weights.directory is /data"),
        (("job.config.weights.directory=/weights2",), "job.config.weights.directory is /weights2"),
        (("job.runsClaim=", "job.config.trainer.tp_size=1"), "run.checkpoint_every"),
        (("job.runsClaim=", "job.config.run.checkpoint_every=0"), "trainer.tp_size"),
    ],
)
def test_a_job_whose_pods_would_not_see_each_others_files_is_refused(settings: tuple[str, ...], complaint: str) -> None:
    refused = templated("rayjob-cuda", *settings)
    assert refused.returncode != 0
    assert complaint in refused.stderr


EGRESS = "auditor.networkPolicy.egress[0].ports[0].port=5432"


@pytest.mark.parametrize(
    ("settings", "repair", "complaint"),
    [
        (
            ("auditor.networkPolicy.readerNamespaces=null",),
            "auditor.networkPolicy.enabled=false",
            "auditor.networkPolicy.readerNamespaces",
        ),
        (
            ("monitoring.prometheusRule.runbookBase=",),
            "monitoring.prometheusRule.enabled=false",
            "monitoring.prometheusRule.runbookBase",
        ),
        (
            ("auditor.tls.existingSecret=x",),
            "monitoring.serviceMonitor.tlsConfig.serverName=a",
            "serviceMonitor.tlsConfig",
        ),
        (
            ("auditor.postgres.url=postgresql://me@db/x", EGRESS),
            "auditor.postgres.existingSecret=x",
            "auditor.postgres.existingSecret",
        ),
        (
            ("auditor.postgres.url=postgresql://me@db/x", "auditor.postgres.existingSecret=x"),
            EGRESS,
            "auditor.postgres.url: the NetworkPolicy lets nothing out",
        ),
        (
            ("auditor.config.archive=s3://x/y", "auditor.config.retain_days=9", "auditor.config.recompute_pool=ray"),
            EGRESS,
            "auditor.config.archive, auditor.config.recompute_pool: the NetworkPolicy lets nothing out",
        ),
    ],
)
def test_values_that_would_install_and_not_work_are_refused_in_one_line(
    settings: tuple[str, ...], repair: str, complaint: str
) -> None:
    refused = templated("auditor", *settings)
    assert refused.returncode != 0
    assert complaint in refused.stderr
    repaired = templated("auditor", *settings, repair)
    assert repaired.returncode == 0, repaired.stderr


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.startswith("auditor") or s == "rayjob-cuda"])
def test_who_is_let_in_by_the_network_policy(shape: str) -> None:
    documents = rendered(HELMS[-1], shape)
    policy = one(documents, "NetworkPolicy")["spec"]
    reporters, readers = policy["ingress"]
    assert one(documents, "ServiceMonitor")
    assert readers["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    label = {"podSelector": {"matchLabels": {"rl-kernel/reports": "true"}}}
    elsewhere = {**label, "namespaceSelector": {"matchLabels": {"team": "rl"}}}
    assert reporters["from"] == [label, *([elsewhere] if shape.startswith("auditor") else [])]


def test_a_ledger_elsewhere_is_found_by_its_name_also_where_the_answer_is_long() -> None:
    egress = one(rendered(HELMS[-1], "auditor-postgres"), "NetworkPolicy")["spec"]["egress"]
    ports = {(port["port"], port["protocol"]) for rule in egress for port in rule["ports"]}
    assert ports == {(5432, "TCP"), (53, "UDP"), (53, "TCP")}


def notes(shape: str, *extra: str) -> str:
    """What is printed after an installation, by Helm 4: Helm 3 asks a cluster first, also in a dry run."""
    file = str(CHART / f"shapes/{shape}.yaml")
    done = helm("4", "install", "rl", str(CHART), "-n", "rl-system", "--dry-run=client", "-f", file, *extra)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


@pytest.mark.skipif("4" not in HELMS, reason="Helm 4 is missing: make ops-tools")
def test_the_notes_say_how_to_submit_a_job_with_the_clusters_token_and_which_kuberay_that_needs() -> None:
    said = notes("raycluster-cuda")
    commands = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    name = one(rendered("4", "raycluster-cuda"), "RayCluster")["metadata"]["name"]
    script = "\n".join(command for command in commands if "port-forward" not in command)
    stand_ins = """
        kubectl() { test "$*" = "-n rl-system get secret rl-job -o jsonpath={.data.auth_token}" && printf c2VjcmV0; }
        ray() { echo "$RAY_ADDRESS $RAY_AUTH_MODE $RAY_AUTH_TOKEN $*"; }
    """
    done = subprocess.run(["bash", "-euc", f"{stand_ins}\n{script}"], capture_output=True, text=True, check=True)
    submit = "job submit -- python3 -m services.main --config /etc/rl-job/job.yaml"
    assert done.stdout.strip() == f"http://127.0.0.1:8265 token secret {submit}"
    assert f"svc/{name}-head-svc 8265" in commands[0]
    assert "KubeRay 1.5.1" in said
    without = notes("raycluster-cuda", "--set", "job.tokenAuth=false")
    assert "ray job submit" in without
    assert "RAY_AUTH" not in without
    assert "KubeRay" not in without
    assert "KubeRay 1.5.1" in notes("rayjob-cuda")


def test_the_statefulset_has_a_headless_service_of_its_own_that_no_monitor_finds() -> None:
    documents = rendered(HELMS[-1], "auditor")
    services = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Service"}
    governing = services[one(documents, "StatefulSet")["spec"]["serviceName"]]
    assert governing["spec"]["clusterIP"] == "None"
    found = one(documents, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    assert [name for name, service in services.items() if found <= service["metadata"]["labels"].items()] == [
        "rl-auditor"
    ]


def test_a_digest_takes_the_place_of_the_tag() -> None:
    digest = "sha256:" + "0f" * 32
    documents = rendered(HELMS[-1], "rayjob-cuda", "--set", f"auditor.image.digest={digest},job.image.digest={digest}")
    (auditor,) = one(documents, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert auditor["image"] == f"rl-kernel-auditor@{digest}"
    assert {pod["containers"][0]["image"] for pod in job_pods(documents)} == {f"rl-kernel-job-cuda@{digest}"}
    refused = templated("auditor", "auditor.image.digest=latest")
    assert refused.returncode != 0
    assert "digest" in refused.stderr


def test_an_archive_in_s3_gets_its_credentials_from_a_secret_or_from_the_service_account() -> None:
    key = {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "secret"}}}
    account = {"annotations": {"example.com/role": "archive"}}
    values = f"auditor.extraEnv={json.dumps([key])}", f"auditor.serviceAccount={json.dumps(account)}"
    for shape in ("auditor", "auditor-postgres"):
        documents = rendered(HELMS[-1], shape, *(word for value in values for word in ("--set-json", value)))
        (container,) = one(documents, "StatefulSet")["spec"]["template"]["spec"]["containers"]
        assert key in container["env"]
        assert len(container["env"]) == (2 if shape == "auditor-postgres" else 1)
        assert one(documents, "ServiceAccount")["metadata"]["annotations"] == {"example.com/role": "archive"}


def test_a_drain_may_move_the_one_pod_unless_somebody_says_that_it_may_not() -> None:
    for setting, allowed in ((), 1), (("--set", "auditor.podDisruptionBudget.maxUnavailable=0"), 0):
        budget = one(rendered(HELMS[-1], "auditor", *setting), "PodDisruptionBudget")["spec"]
        assert budget["maxUnavailable"] == allowed
    refused = templated("auditor", "auditor.podDisruptionBudget.maxUnavailable=2")
    assert refused.returncode != 0
    assert "maxUnavailable" in refused.stderr


def test_the_pod_for_a_restore_holds_the_charts_claim_and_may_no_more_than_the_auditor() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing").validate
    given = yaml.safe_load((REPOSITORY / "deploy/ledger-pod.yaml").read_text())
    validate(given, KUBERNETES, strict=True)
    documents = rendered(HELMS[-1], "auditor")
    statefulset = one(documents, "StatefulSet")
    pod, theirs = given["spec"], statefulset["spec"]["template"]["spec"]
    (container,), (auditor,) = pod["containers"], theirs["containers"]
    (template,) = statefulset["spec"]["volumeClaimTemplates"]
    claim = f"{template['metadata']['name']}-{statefulset['metadata']['name']}-0"
    assert claims(pod) == {"/var/lib/auditor": claim}
    assert container["image"] == auditor["image"]
    assert container["securityContext"] == auditor["securityContext"]
    assert pod["securityContext"].items() <= theirs["securityContext"].items()
    assert pod["automountServiceAccountToken"] is False
    (text,) = [d["data"]["auditor.yaml"] for d in documents if "auditor.yaml" in d.get("data", {})]
    config = yaml.safe_load(text)
    folder, _, file = config["ledger"].rpartition("/")
    assert folder == container["volumeMounts"][0]["mountPath"]
    said = (REPOSITORY / "docs/operations/backup.md").read_text().partition("## Kubernetes")[2]
    assert set(re.findall(r"[\w-]+\.db", said)) == {file, "backup.db"}


def test_what_the_shape_of_the_page_takes_for_given_is_named_on_it() -> None:
    page = (REPOSITORY / "docs/operations/install.md").read_text()
    values = yaml.safe_load((CHART / "shapes/auditor.yaml").read_text())
    auditor, monitoring = values["auditor"], values["monitoring"]
    names = [values["weights"]["existingClaim"], auditor["persistence"]["storageClass"], *auditor["token"].values()]
    labels = [auditor["networkPolicy"]["reporterNamespaces"]["matchLabels"], monitoring["serviceMonitor"]["labels"]]
    names += [f"{name}: {value}" for label in labels for name, value in label.items()]
    names += auditor["networkPolicy"]["readerNamespaces"]["matchLabels"].values()
    assert [name for name in names if f"`{name}`" not in page and f" {name} " not in page] == []


def test_nothing_ends_an_auditor_that_brings_a_large_ledger_up_to_date() -> None:
    (container,) = one(rendered(HELMS[-1], "auditor"), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 7200
