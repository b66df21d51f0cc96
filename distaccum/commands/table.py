"""The subcommands of ``distaccum``: a name, what is called, and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Command:
    """A subcommand: ``target`` is ``module:function``, which reads ``sys.argv[1:]`` and may exit."""

    name: str
    target: str
    says: str

    @property
    def module(self) -> str:
        """The module that is imported once the command is chosen."""
        return self.target.partition(":")[0]

    def is_there(self) -> bool:
        """Whether this installation has the command; looks for its module, and imports none but empty packages."""
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False

    def load(self) -> Any:
        """Imports the function."""
        module, _, function = self.target.partition(":")
        return getattr(import_module(module), function)


TABLE = (
    Command(
        "train",
        "distaccum.train.__main__:main",
        "trains what the settings describe, in one process or under torchrun",
    ),
    Command(
        "plan",
        "distaccum.train.plan:main",
        "forecasts what a run would hold, send and take on a cluster",
    ),
    Command(
        "verify",
        "distaccum.train.verify:main",
        "says what a run directory holds, whole or not, and what resume=auto would do",
    ),
    Command(
        "compare",
        "distaccum.train.compare:main",
        "says the first window in which two runs differ, and in what",
    ),
    Command(
        "export",
        "distaccum.checkpoint.export:main",
        "writes a checkpoint's weights into one safetensors file",
    ),
    Command(
        "report",
        "distaccum.report.command:main",
        "draws the curves of one run or several into one HTML file",
    ),
    Command(
        "audit",
        "distaccum.auditing.command:main",
        "compares the gradient of somebody's script with the global batch's",
    ),
    Command(
        "doctor",
        "distaccum.doctor.command:main",
        "looks at this machine and the links between ranks, and says what to mend",
    ),
    Command(
        "wandb-upload",
        "distaccum.train.metrics.wandb:main",
        "makes a W&B run of a run's metrics.jsonl",
    ),
)


def commands() -> dict[str, Command]:
    """The subcommands of this installation, by name."""
    return {command.name: command for command in TABLE if command.is_there()}
