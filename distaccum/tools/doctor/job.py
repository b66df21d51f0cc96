"""What has started this process and what it was told: torchrun, Slurm, Kubernetes, variables, and W&B's login."""

from __future__ import annotations

import netrc
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import time
from urllib.parse import urlsplit

from distaccum.config.checks import seconds_of
from distaccum.config.secrets import redact
from distaccum.errors import ConfigError
from distaccum.tools.doctor.facts import Look

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_RESTARTS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
_SETTINGS = ("NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "OMP_", "MKL_", "UCX_", "FI_", "DS_")
_WANDB = "https://api.wandb.ai"
_SHORT_S, _LEAD_S = 600, 60
_ANSWER_S = 5.0
_SIGNAL = re.compile(r"^#SBATCH\s+(?:.*\s)?--signal[=\s]\s*['\"]?(?P<signal>[\w:@]+)", re.MULTILINE)


def job(environment: Mapping[str, str] = os.environ) -> Look:
    """The launcher's facts, the settings that libraries read, and W&B's."""
    found = Look()
    told = {name: environment[name] for name in _TORCHRUN if name in environment}
    if told:
        found.tell("launcher", ", ".join(f"{name}={value}" for name, value in told.items()), told)
    if "TORCHELASTIC_RUN_ID" in environment:
        run, restarted, most = (environment.get(name, "0") for name in _RESTARTS)
        found.tell("torchrun", f"job {run}, restarted {restarted} of at most {most} times")
    _slurm(found, environment)
    if "KUBERNETES_SERVICE_HOST" in environment:
        space = _text(Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")) or "unknown namespace"
        found.tell("Kubernetes", f"pod {environment.get('HOSTNAME', '')} in {space}")
    told = settings(environment)
    found.tell("settings", ", ".join(f"{name}={value}" for name, value in told.items()) or "none", told)
    _wandb(found, environment)
    return found


def settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that NCCL, gloo, torch and their transports read, without secrets."""
    named = {name: value for name, value in sorted(environment.items()) if name.startswith(_SETTINGS)}
    found: dict[str, str] = redact(named)
    return found


def _slurm(found: Look, environment: Mapping[str, str]) -> None:
    number = environment.get("SLURM_JOB_ID")
    if not number:
        return
    told = {name: environment.get(f"SLURM_{name}", "") for name in ("JOB_NUM_NODES", "NTASKS", "CPUS_ON_NODE")}
    nodes, tasks, cores = (int(one) if one.isdecimal() else None for one in told.values())
    names = environment.get("SLURM_JOB_NODELIST", "")
    counted = ((nodes, f"nodes ({names})"), (tasks, "tasks"), (cores, "cores on this node"))
    text = ", ".join([f"job {number}", *(f"{count} {what}" for count, what in counted if count is not None)])
    found.tell("Slurm", text, {"job": number, "nodes": nodes, "names": names, "tasks": tasks, "cores": cores})
    left = _time_left(number, environment)
    if left is not None:
        found.tell("time left", f"{left / 60:.0f} min", round(left))
        if left < _SHORT_S:
            mend = f"sudo scontrol update jobid={number} timelimit=+60    # or submit a longer one"
            found.find(f"Slurm ends this job in {left:.0f} s", mend, wrong=False)
    script = _answer("scontrol", "write", "batch_script", number, "-")
    if script is None:
        return
    asked = _SIGNAL.search(script)
    lead = int(asked["signal"].partition("@")[2] or _LEAD_S) if asked else None
    found.tell("signal before the limit", f"--signal={asked['signal']}" if asked else "none", lead or 0)
    if lead is None:
        what = "Slurm gives this job no signal before its time limit: a run cannot save then"
        found.find(what, "#SBATCH --signal=B:USR1@120    # as in slurm/train.sbatch", wrong=False)


def _time_left(number: str, environment: Mapping[str, str]) -> float | None:
    """Seconds; by Slurm's variable, which came with 22.05, or by its queue. None where neither says."""
    with suppress(ValueError, KeyError):
        return int(environment["SLURM_JOB_END_TIME"]) - time()
    with suppress(ConfigError):  # UNLIMITED, INVALID
        return seconds_of("squeue", (_answer("squeue", "-h", "-j", number, "-o", "%L") or "").strip())
    return None


def _answer(*command: str) -> str | None:
    if not shutil.which(command[0]):
        return None
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)  # noqa: S603
        return done.stdout if done.returncode == 0 else None
    return None


def _wandb(found: Look, environment: Mapping[str, str]) -> None:
    mode = environment.get("WANDB_MODE", "")
    host = urlsplit(environment.get("WANDB_BASE_URL") or _WANDB).hostname or ""
    key = "by WANDB_API_KEY" if environment.get("WANDB_API_KEY") else _netrc(host, environment)
    login = f"a key for {host} {key}" if key else f"no key for {host}"
    found.tell("W&B", f"{login}; WANDB_MODE {f'is {mode}' if mode else 'is not set'}", {"key": bool(key), "mode": mode})
    if not key and mode in ("online", "shared"):
        found.find(
            f"WANDB_MODE={mode}, and there is no key for {host}", "wandb login    # or export WANDB_MODE=offline"
        )
    elif not key and not mode:
        what = f"there is no key of W&B for {host}: runs are written to disk alone (metrics.wandb.mode=offline)"
        found.find(what, "wandb login    # or export WANDB_MODE=offline, and wandb sync later", wrong=False)


def _netrc(host: str, environment: Mapping[str, str]) -> str:
    path = Path(environment.get("NETRC") or Path(environment.get("HOME", "/")) / ".netrc")
    with suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(str(path)).authenticators(host):
            return f"in {path}"
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
