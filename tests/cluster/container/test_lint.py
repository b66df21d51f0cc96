"""What can be known of the image's files without building them: each check also has to find a fault."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.cluster.container import host
from tests.support.commands import ROOT

BIN = Path(sys.executable).parent
SCRIPT = ROOT / "launch" / "container.sh"
DOCKERFILE = ROOT / "Dockerfile"
MANIFEST = ROOT / "launch" / "k8s" / "job.yaml"
KUBERNETES = "1.31"  # the oldest that knows every field of it without a feature gate


def _says(tool: str, file: Path) -> tuple[int, str]:
    options = ["--config", str(ROOT / ".hadolint.yaml"), "--no-color"] if tool == "hadolint" else ["--color=never"]
    finished = subprocess.run([BIN / tool, *options, file], capture_output=True, text=True, check=False)
    return finished.returncode, finished.stdout + finished.stderr


def _documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def _job() -> dict[str, Any]:
    return copy.deepcopy(next(one for one in _documents() if one["kind"] == "Job"))


def test_hadolint_has_nothing_to_say() -> None:
    assert _says("hadolint", DOCKERFILE) == (0, "")


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        (
            'ENTRYPOINT ["tini", "--", "/opt/distaccum/launch/container.sh"]',
            "ENTRYPOINT tini -- container.sh",
            "DL3025",
        ),
        ("USER 10001:10001", "USER root", "DL3002"),
        ("WORKDIR /workspace", "WORKDIR workspace", "DL3000"),
    ],
)
def test_hadolint_finds(right: str, wrong: str, rule: str, tmp_path: Path) -> None:
    text = DOCKERFILE.read_text()
    assert text.count(right) == 1
    (tmp_path / "Dockerfile").write_text(text.replace(right, wrong))
    code, said = _says("hadolint", tmp_path / "Dockerfile")
    assert code != 0
    assert rule in said


def test_shellcheck_has_nothing_to_say() -> None:
    assert _says("shellcheck", SCRIPT) == (0, "")


def test_shellcheck_finds_an_unquoted_argument(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    assert text.count('exec "$@"') == 1
    (tmp_path / "container.sh").write_text(text.replace('exec "$@"', "exec $@"))
    code, said = _says("shellcheck", tmp_path / "container.sh")
    assert code != 0
    assert "SC2068" in said


def test_the_manifest_is_what_kubernetes_takes() -> None:
    assert [one["kind"] for one in _documents()] == ["Service", "PersistentVolumeClaim", "Job"]
    for document in _documents():
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("completionMode", 1),
        ("backofLimit", 12),
        ("template", {"spec": {"volumes": []}}),
        ("podFailurePolicy", {"rules": [{"onExitCodes": {}}]}),
    ],
)
def test_a_broken_manifest_is_refused(key: str, value: object) -> None:
    job = _job()
    job["spec"][key] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_the_manifest_agrees_with_itself_and_the_image() -> None:
    """What no schema tells: names that have to meet, numbers that have to fit."""
    service, claim, job = _documents()
    pod = job["spec"]["template"]["spec"]
    train = pod["containers"][0]
    given = {one["name"]: one.get("value") for one in train["env"]}
    assert job["spec"]["completionMode"] == "Indexed"  # or there are no ranks
    assert str(job["spec"]["completions"]) == str(job["spec"]["parallelism"]) == given["NNODES"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes takes no podFailurePolicy otherwise
    assert pod["terminationGracePeriodSeconds"] > int(given["STOP_SECONDS"])
    assert [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one] == [
        claim["metadata"]["name"]
    ]
    assert {one["name"] for one in train["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    fails, preempted, ignores = job["spec"]["podFailurePolicy"]["rules"]
    assert (preempted["action"], preempted["onExitCodes"]["values"]) == ("Ignore", [75])
    assert "|| exit 75" in SCRIPT.read_text()
    assert (fails["action"], fails["onExitCodes"]["containerName"]) == ("FailJob", train["name"])
    assert fails["onExitCodes"]["values"] == [2]
    assert ignores["action"] == "Ignore"
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert f"\nUSER {user}\n" in DOCKERFILE.read_text()
    assert f"{train['resources']['limits']['nvidia.com/gpu']}".isdecimal()


def test_every_variable_of_the_manifest_is_one_that_the_entry_point_reads() -> None:
    train = _job()["spec"]["template"]["spec"]["containers"][0]
    names = {one["name"] for one in train["env"]} - {"WANDB_API_KEY"}
    assert names
    assert [name for name in sorted(names) if f"#   {name}" not in SCRIPT.read_text().replace(", ", "\n#   ")] == []


def test_what_pip_is_told_here_reaches_a_build(tmp_path: Path) -> None:
    """Folders and files are mounted; an index's parent is, for the files that it links to; addresses stay."""
    index, wheels, certificate = tmp_path / "mirror" / "simple", tmp_path / "wheels", tmp_path / "ca.crt"
    index.mkdir(parents=True)
    wheels.mkdir()
    certificate.touch()
    listing = "\n".join(
        [
            f":env:.find-links={str(wheels)!r}",
            "global.find-links='/somewhere/else'",
            f"global.extra-index-url='https://index.example.com/simple file://{index}'",
            f"install.cert={str(certificate)!r}",
        ]
    )
    source = host.pip_source(listing)
    assert source.mounts == {
        wheels: wheels,
        index.parent: index.parent,
        certificate: Path("/mnt/host/ca.crt"),
    }
    assert source.config == (
        f"[global]\nfind-links = {wheels}\n"
        f"extra-index-url = https://index.example.com/simple\n    file://{index}\n"
        "[install]\ncert = /mnt/host/ca.crt\n"
    )
