"""``deterministic=true``: kernels that give the same bits in every run, and an error that names one which cannot.

``numerics=reproducible`` asks for them too, and for a number of threads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from distaccum.config.schema import RunConfig
from distaccum.errors import ConfigError, MisuseError

_VARIABLE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
_MESSAGE = re.compile(r"(\S+) does not have a deterministic implementation")


def check(device: torch.device) -> None:
    """Refuses what only the environment can mend, before there is a process group.

    Raises:
        ConfigError: cuBLAS takes its workspaces as it likes, and so the order of its sums.
    """
    if device.type == "cuda" and torch.version.cuda and os.environ.get(_VARIABLE) not in _WORKSPACES:
        problem = f"cuBLAS needs {_VARIABLE}={_WORKSPACES[0]} in the environment for it, and it is not set so"
        raise ConfigError("deterministic", True, problem, "Set it where the run is started, or use deterministic=false")


def is_wanted(config: RunConfig) -> bool:
    """Whether the settings ask for such kernels."""
    return config.deterministic or config.reproducible


def threads(config: RunConfig, device: torch.device) -> int:
    """How many threads of a CPU each rank's kernels have."""
    if config.trainer.threads is not None:
        return config.trainer.threads
    return 1 if config.reproducible and device.type == "cpu" else torch.get_num_threads()


def kernels(config: RunConfig, device: torch.device) -> dict[str, str]:
    """What a micro-batch's bits depend on beside the settings, by name."""
    name = (
        f"a CPU ({torch.backends.cpu.get_cpu_capability()})"
        if device.type == "cpu"
        else torch.get_device_module(device).get_device_name(device)
    )
    return {"torch": torch.__version__, "device": name, "threads": str(threads(config, device))}


@contextmanager
def threads_of(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Within it torch's kernels have as many threads of a CPU as the settings say."""
    before, wanted = torch.get_num_threads(), threads(config, device)
    if wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def deterministic_for(config: RunConfig) -> AbstractContextManager[None]:
    """:func:`deterministic`, as the settings say."""
    named = "numerics=reproducible" if config.reproducible else "deterministic=true"
    return deterministic(is_wanted(config), named=named)


@contextmanager
def deterministic(wanted: bool, *, named: str = "deterministic=true") -> Iterator[None]:
    """Within it torch uses deterministic kernels, where ``wanted``; afterwards everything is as before.

    Args:
        wanted: whether it does.
        named: the setting that asks for it.

    Raises:
        MisuseError: a kernel was called that has no deterministic form.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    benchmark, fills = torch.backends.cudnn.benchmark, settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # it writes every new tensor once more
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it chooses a kernel by the time that each takes
    try:
        yield
    except RuntimeError as error:
        if not (found := _MESSAGE.search(str(error))):
            raise
        remedy = "deterministic=false" if named.startswith("deterministic") else "numerics=fast"
        problem = f"{named}: {found[1]} has no deterministic implementation on this device"
        raise MisuseError(f"{problem}. Replace it in the model or the loss, or use {remedy}") from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        settings.fill_uninitialized_memory = fills
