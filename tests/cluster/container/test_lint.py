"""What can be known of the image's files without building them: each check also has to find a fault."""

import copy
import re
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
    assert [one["kind"] for one in _documents()] == ["ServiceAccount", "Service", "PersistentVolumeClaim", "Job"]
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
    account, service, claim, job = _documents()
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
    assert pod["serviceAccountName"] == account["metadata"]["name"]
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


def test_the_pods_have_no_rights() -> None:
    account, *_, job = _documents()
    pod = job["spec"]["template"]["spec"]
    (train,) = pod["containers"]
    assert "initContainers" not in pod
    assert account["automountServiceAccountToken"] is pod["automountServiceAccountToken"] is False
    assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"))
    assert not any("hostPath" in volume for volume in pod["volumes"])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert train["securityContext"] == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_pods_can_write_where_the_image_does() -> None:
    """Its root is read-only: volumes hold its home and working directory, temporary files, and the runs."""
    pod = _job()["spec"]["template"]["spec"]
    mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: set(one) - {"name"} for one in pod["volumes"]}
    kinds = {path: volumes[name] for path, name in mounts.items()}
    assert kinds == {
        "/workspace": {"emptyDir"},
        "/tmp": {"emptyDir"},  # noqa: S108  the container's own
        "/workspace/runs": {"persistentVolumeClaim"},
        "/dev/shm": {"emptyDir"},  # noqa: S108
    }
    dockerfile = DOCKERFILE.read_text()
    assert "HOME=/workspace" in dockerfile
    assert "\nWORKDIR /workspace\n" in dockerfile


def test_the_image_installs_what_is_locked() -> None:
    """Every install names the lock files, or brings no dependencies; and each of their lines is one version."""
    commands = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    installs = [
        part for line in commands if line.startswith("RUN") for part in line.split("&&") if "pip install" in part
    ]
    assert len(installs) == 3
    for install in installs:
        assert "-r /tmp/first.txt" in install or "--no-deps" in install, install  # made of the lock files
    assert "requirements.lock requirements-dev.lock > /tmp/first.txt" in DOCKERFILE.read_text()
    for name in ("requirements.lock", "requirements-dev.lock"):
        lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
        named = [line for line in lines if line and not line.startswith("-")]
        assert named
        assert [line for line in named if "==" not in line or "*" in line] == []
    assert "requirements.lock" in (ROOT / "launch" / "setup.sh").read_text()


def test_no_temporary_file_has_a_name_that_others_can_guess() -> None:
    """In folders that others share: only Python's tempfile and mktemp name them. (Run directories: test_run_dir.py.)"""
    named = re.compile(r"/tmp\b|mktemp -u|tempfile\.mktemp|gettempdir")  # noqa: S108  what is looked for
    files = [path for folder in ("distaccum", "launch", "slurm", "conf") for path in (ROOT / folder).rglob("*")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        if path.suffix in (".py", ".sh", ".sbatch", ".yaml")
        for line in path.read_text().splitlines()
        if named.search(line)
    ]
    assert found == [
        'distaccum/data/factory.py: folder = tempfile.gettempdir() if own.num_workers else ""',  # its length is read
        "launch/k8s/job.yaml: mountPath: /tmp",  # a volume of the pod's own
    ]


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
    assert source.mounts == {wheels: wheels, index.parent: index.parent, certificate: Path("/mnt/host/ca.crt")}
    assert source.config == (
        f"[global]\nfind-links = {wheels}\n"
        f"extra-index-url = https://index.example.com/simple\n    file://{index}\n"
        "[install]\ncert = /mnt/host/ca.crt\n"
    )
