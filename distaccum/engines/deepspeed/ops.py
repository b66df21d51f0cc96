"""DeepSpeed's kernels: which are built, and which can be when they are first used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from distaccum.engines.deepspeed.compat import load_deepspeed, suppress_output
from distaccum.engines.deepspeed.internals import check_version

PACKAGE = "deepspeed"
"""The name of the package, and of distaccum's extra."""


@dataclass(frozen=True, kw_only=True)
class Ops:
    """The kernels of the installed DeepSpeed, by name."""

    version: str
    installed: tuple[str, ...]
    compatible: tuple[str, ...]
    """Not installed; compiled at their first use, where there is a compiler."""


def installed_version() -> str | None:
    """The version of DeepSpeed, which is not imported for it; None where it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def ops(device: torch.device) -> Ops:
    """Imports DeepSpeed for this kind of device and asks each kernel, as ``ds_report`` does. Takes seconds.

    Raises:
        ConfigError: it is not installed, cannot be imported, or is a version that is not known to be exact.
    """
    deepspeed = load_deepspeed(device, planned=True)
    check_version(deepspeed)
    with suppress_output():
        built: dict[str, bool] = import_module("deepspeed.git_version_info").installed_ops
        builders: dict[str, Any] = import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
        compatible = [name for name, builder in builders.items() if _is_compatible(builder)]
    return Ops(
        version=str(deepspeed.__version__),
        installed=tuple(sorted(name for name, there in built.items() if there)),
        compatible=tuple(sorted(name for name in compatible if not built.get(name))),
    )


def _is_compatible(builder: Any) -> bool:
    try:
        return bool(builder.is_compatible(verbose=False))
    except Exception:  # a builder that fails to say so cannot be built either
        return False
