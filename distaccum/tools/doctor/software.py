"""What is installed: Python, torch and what it was built for, compilers, DeepSpeed and its kernels."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import distaccum
from distaccum.config.extras import install_command
from distaccum.errors import ConfigError
from distaccum.tools.doctor.facts import Look

PYTHON = (3, 11)
TORCH = (2, 8)
"""The oldest that pyproject.toml allows."""
_COMPILERS = ("g++", "clang++", "c++")  # those that torch's inductor looks for, after $CXX


def installed() -> Look:
    """Python, torch and what compiles."""
    found = Look()
    found.tell("distaccum", distaccum.__version__)
    wanted = ".".join(map(str, PYTHON))
    found.tell("Python", f"{platform.python_version()} ({sys.executable})", platform.python_version())
    if sys.version_info < PYTHON:
        found.find(f"Python {platform.python_version()} is older than {wanted}", f"install Python {wanted} or later")
    _torch(found)
    _compilers(found)
    return found


def kernels() -> Look:
    """DeepSpeed and its kernels, each asked as ``ds_report`` does. Imports it, which takes seconds."""
    from distaccum.engines.deepspeed.compat import PACKAGE  # noqa: PLC0415  only where torch can be imported

    found = Look()
    try:
        number = version(PACKAGE)
    except PackageNotFoundError:
        found.tell("DeepSpeed", f"not installed (engine=deepspeed needs it: {install_command(PACKAGE)})", "")
        return found
    found.tell("DeepSpeed", number)
    try:
        built, buildable = _kernels()
    except ConfigError as error:
        found.find(str(error), f"{sys.executable} -m pip install '{PACKAGE}>=0.19.8'")
        return found
    found.tell("kernels built", ", ".join(built) or "none", built)
    text = ", ".join(buildable) or "none"
    found.tell("kernels that can be built", f"{text} (compiled at first use)", buildable)
    return found


def _kernels() -> tuple[list[str], list[str]]:
    """Those that are built, and those that a compiler can build when they are first used.

    Raises:
        ConfigError: DeepSpeed cannot be imported, or is a version that is not known to be exact.
    """
    import torch  # noqa: PLC0415  it may be what is wrong

    from distaccum.engines.deepspeed.compat import load_deepspeed, suppress_output  # noqa: PLC0415

    load_deepspeed(torch.device("cuda" if torch.cuda.is_available() else "cpu"), planned=True)
    with suppress_output():
        built: dict[str, bool] = import_module("deepspeed.git_version_info").installed_ops
        builders: dict[str, Any] = import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
        buildable = [name for name, builder in builders.items() if _is_compatible(builder)]
    return sorted(name for name, there in built.items() if there), sorted(n for n in buildable if not built.get(n))


def _is_compatible(builder: Any) -> bool:
    try:
        return bool(builder.is_compatible(verbose=False))
    except Exception:  # a builder that fails to say so cannot be built either
        return False


def _torch(found: Look) -> None:
    wanted = ".".join(map(str, TORCH))
    install = f"{sys.executable} -m pip install --force-reinstall 'torch>={wanted}'"
    try:
        import torch  # noqa: PLC0415  it may be what is wrong
    except ImportError as error:
        found.tell("torch", f"cannot be imported: {error}")
        found.find(f"torch cannot be imported: {error}", install)
        return
    found.tell("torch", torch.__version__)
    if numbers(torch.__version__) < TORCH:
        found.find(f"torch {torch.__version__} is older than {wanted}", install)
    built = torch.version.cuda
    found.tell(
        "torch built for", f"CUDA {built}" if built else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
    )
    if built:
        found.tell("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    try:
        found.tell("Triton", version("triton"))
    except PackageNotFoundError:
        found.tell("Triton", "not installed", "")
        if built:
            found.find(
                "Triton is not installed, without which nothing can be compiled for a GPU (compile=model)",
                f"{sys.executable} -m pip install triton",
                wrong=False,
            )


def _compilers(found: Look) -> None:
    told = os.environ.get("CXX", "")
    compiler = next((path for name in (told, *_COMPILERS) if name and (path := shutil.which(name))), None)
    if compiler is None:
        found.tell("C++ compiler", "none", "")
        found.find(
            "there is no C++ compiler, with which torch.compile and DeepSpeed build code for the CPU",
            "apt-get install g++",
            wrong=False,
        )
    else:
        found.tell("C++ compiler", f"{first_line(compiler, '--version')} ({compiler})")
    home = os.environ.get("CUDA_HOME", "")
    nvcc = shutil.which(f"{home}/bin/nvcc") if home else shutil.which("nvcc")
    said = re.search(r"release (\d+)\.(\d+)", _output(nvcc, "--version")) if nvcc else None
    toolkit = f"{said[1]}.{said[2]}" if said else ""
    found.tell("CUDA toolkit", f"{toolkit} ({nvcc})" if toolkit else "none (only builds of kernels need one)", toolkit)
    torch = sys.modules.get("torch")
    built = getattr(getattr(torch, "version", None), "cuda", None)
    if toolkit and built and numbers(toolkit)[0] != numbers(built)[0]:  # torch's own check of extensions
        found.find(
            f"the CUDA toolkit is {toolkit} and torch was built for {built}: kernels cannot be built for it",
            f"export CUDA_HOME=/usr/local/cuda-{built}",
            wrong=False,
        )


def numbers(text: str) -> tuple[int, ...]:
    """``(2, 13, 0)`` of ``"2.13.0+cpu"``."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0]))


def first_line(*command: str) -> str:
    """The first line that a program prints; empty where it fails."""
    return (_output(*command).splitlines() or [""])[0].strip()


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own words
    return done.stdout if done.returncode == 0 else ""
