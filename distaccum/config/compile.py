"""The settings of ``conf/compile/``: what of a model ``torch.compile`` is given, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distaccum.config.checks import require, require_annotated, require_choice, settings_by_name

COMPILED = ("none", "blocks", "model")
MODES = ("default", "max-autotune-no-cudagraphs")
DYNAMIC = (False, True, "auto")
INDUCTOR = "inductor"
# Torch's modes that capture CUDA graphs, by those that compile the same without.
WITH_GRAPHS = {"default": "reduce-overhead", "max-autotune-no-cudagraphs": "max-autotune"}


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """What is compiled, and how.

    Args:
        name (none | blocks | model): nothing, each of the model's ``blocks`` by itself, or the ``model`` as a whole.
        blocks: Names of the modules to compile one by one, such as ``[encoder.*]``. Empty: the model's own blocks.
        backend: Backend of ``torch.compile``.
        mode (default | max-autotune-no-cudagraphs): Mode of inductor.
        dynamic (false | true | auto): Compile again for each shape (``false``), once for all shapes (``true``), or for
            all shapes from the second one on (``auto``).
        fullgraph: Raise an error if the forward is not a single graph.
        loss: Also compile the loss.
        graphs: Replay compiled micro-steps as CUDA graphs.
    """

    name: str = "none"
    blocks: list[str] = field(default_factory=list)
    backend: str = INDUCTOR
    mode: str = "default"
    dynamic: Any = False
    fullgraph: bool = False
    loss: bool = True
    graphs: bool = False

    def __post_init__(self) -> None:
        require_annotated("compile", self)
        require_choice("compile", self.name, COMPILED)
        fits = self.name == "blocks" or not self.blocks
        require(fits, "compile.blocks", self.blocks, f"and compile={self.name}", "Use compile=blocks, or leave it out")
        if self.mode in WITH_GRAPHS.values():
            problem = "captures CUDA graphs, in whose memory the next micro-step writes"
            remedy = f"Use {' or '.join(MODES)}, with compile.graphs=true for graphs"
            require(False, "compile.mode", self.mode, problem, remedy)
        require_choice("compile.mode", self.mode, MODES)
        problem = f"and compile.backend={self.backend} has no modes"
        fits = self.mode == "default" or self.backend == INDUCTOR
        require(fits, "compile.mode", self.mode, problem, "Leave one of them out")
        require_choice("compile.dynamic", self.dynamic, DYNAMIC)
        if self.graphs:
            key = "compile.graphs"
            require(
                self.compiles, key, True, f"and compile={self.name}", "Use compile=blocks or model, or leave it out"
            )
            problem, remedy = f"and compile.backend={self.backend} captures none", f"Use {INDUCTOR}, or leave it out"
            require(self.backend == INDUCTOR, key, True, problem, remedy)
            problem = f"and compile.dynamic={self.dynamic}: a graph has fixed shapes"
            require(self.dynamic is False, key, True, problem, "Leave one of them out")

    @classmethod
    def of(cls, given: str | CompileConfig) -> CompileConfig:
        """The settings that are given by name, or as they are.

        Raises:
            ConfigError: it is neither, or there is no such name.
        """
        return settings_by_name(cls, given, key="compile", names=COMPILED)

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled."""
        return self.name != "none"
