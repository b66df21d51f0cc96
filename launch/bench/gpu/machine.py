"""Facts of the machine that figures are of."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from launch import ROOT

PACKAGES = ("torch", "numpy", "triton", "deepspeed", "transformers", "safetensors", "hydra-core", "pytest", "rich")
_ASKED = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"


def facts() -> dict[str, Any]:
    """The card, the driver and versions; of a machine without CUDA, ``cuda`` and ``card`` are empty."""
    cuda = torch.cuda.is_available()
    card = torch.cuda.get_device_properties(0) if cuda else None
    return {
        "card": card.name if card else "",
        "cards": torch.cuda.device_count() if cuda else 0,
        "memory_bytes": card.total_memory if card else 0,
        "capability": list(torch.cuda.get_device_capability(0)) if cuda else [],
        "cuda": (torch.version.cuda or torch.version.hip or "") if cuda else "",
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": list(torch.cuda.nccl.version()) if cuda else [],
        "driver": _driver(),
        "nvidia-smi": _said("nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader") if cuda else "",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }


def _driver() -> str:
    """Of NVIDIA's kernel module: its version, as it says it itself; empty where there is none."""
    with suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "")
    return ""


def _said(*command: str) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
