"""Compiled forwards: ``torch.compile`` inside of what an engine wraps, of the model or of each of its blocks.

A module's ``forward`` is compiled, and not its ``__call__``: the hooks on it, an engine's among them, stay outside of
the graph, and names in checkpoints are the model's own. What is communicated between two blocks is never traced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distaccum.config.compile import INDUCTOR, CompileConfig
from distaccum.config.engine import DeepSpeedConfig, EngineConfig
from distaccum.errors import ConfigError, shorten

_log = logging.getLogger(__name__)

_WARM_UP = 2  # windows that compile what the later ones run
_MANY = 8  # graphs after that: as many as torch makes of one function before it runs the rest uncompiled
_SHARDS_PARAMETERS = 3  # the stage of DeepSpeed that does


class CompiledForward:
    """In the place of a module's ``forward``. A copy of the module, by ``deepcopy`` or pickle, has the plain one.

    Args:
        module: whose forward it is.
        config: says how it is compiled.
    """

    def __init__(self, module: nn.Module, config: CompileConfig) -> None:
        self._module, self._own = module, "forward" in vars(module)
        self.plain: Callable[..., Any] = module.forward
        options: Any = {"mode": config.mode} if config.backend == INDUCTOR else {}
        dynamic = None if config.dynamic == "auto" else config.dynamic
        self._compiled = torch.compile(
            self.plain, backend=config.backend, dynamic=dynamic, fullgraph=config.fullgraph, **options
        )
        update_wrapper(self, self.plain)
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.plain,)

    def undo(self) -> None:
        """Gives the module its plain forward back, unless somebody has put another one there."""
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._own:
                vars(self._module)["forward"] = self.plain


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class Compiled:
    """What is compiled of an engine's model; counts what is compiled after the first windows, and says so once.

    Args:
        modules: the parts to compile, once the engine has wrapped the model: what it has put in the place of a
            parameter or a forward is compiled with them.
        config: how.
        tells: whether this rank logs.
    """

    def __init__(self, modules: Sequence[nn.Module], config: CompileConfig, *, tells: bool) -> None:
        self.recompiles = 0
        """Graphs that this rank has compiled in its windows, from the third one on."""
        self._tells, self._dynamic = tells, config.dynamic
        self.graphs = 0
        """Graphs that this rank has compiled in its windows."""
        self._windows = 0
        self._counters = _counters()
        self._before, self._breaks_before = self._made(), self._breaks()
        self._forwards = [CompiledForward(module, config) for module in modules]

    def window_began(self) -> None:
        """Called before a window's first micro-step."""
        self._before = self._made()

    def window_ended(self) -> None:
        """Called after its step."""
        new = max(0, self._made() - self._before)
        self._windows += 1
        if self._windows <= _WARM_UP:
            self.graphs += new
            if self._windows == _WARM_UP and self._tells:
                self._tell_first()
        elif new:
            self.graphs += new
            few, self.recompiles = self.recompiles < _MANY, self.recompiles + new
            if few and self.recompiles >= _MANY and self._tells:
                self._tell_many()

    def _tell_first(self) -> None:
        broken = {reason: n - self._breaks_before.get(reason, 0) for reason, n in self._breaks().items()}
        reasons = [reason.splitlines()[0] for reason, n in broken.items() if n > 0]
        _log.info("compiled %d graphs of %d parts in the first windows", self.graphs, len(self._forwards))
        if not self.graphs:
            problem = "compile is on, and nothing was compiled"
            _log.warning("%s: torch runs the forward as it is, or has compiled it before in this process", problem)
        elif reasons:
            remedy = "TORCH_LOGS=graph_breaks shows where, compile.fullgraph=true makes it an error"
            _log.warning("the compiled forward is in several graphs (%s): %s", shorten(reasons), remedy)

    def _tell_many(self) -> None:
        remedy = "give micro-batches one shape" + ("" if self._dynamic is True else ", or use compile.dynamic=true")
        problem = "after its eighth version torch runs a function uncompiled"
        _log.warning(
            "%d graphs compiled after the first windows: %s. TORCH_LOGS=recompiles says why; %s",
            self.recompiles,
            problem,
            remedy,
        )

    def _made(self) -> int:
        return int(self._counters["stats"]["unique_graphs"])

    def _breaks(self) -> dict[str, int]:
        return dict(self._counters["graph_break"])

    def undo(self) -> None:
        """Gives every module its plain forward back."""
        for forward in self._forwards:
            forward.undo()
        self._forwards = []


def compiled_parts(model: nn.Module) -> list[str]:
    """The names of the modules whose forward is compiled, by whomever; the model itself is ``the model``."""
    return [name or "the model" for name, module in model.named_modules() if _is_compiled(module)]


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Within the block what is compiled of a model runs as it was written; free where nothing is."""
    return torch.compiler.set_stance("force_eager") if compiled_parts(model) else nullcontext()


def _is_compiled(module: nn.Module) -> bool:
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        return True
    forward = vars(module).get("forward")
    return isinstance(forward, CompiledForward) or hasattr(forward, "_torchdynamo_orig_callable")


def innermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that hold no other of them: what happens between two blocks is not for a graph."""
    every = set(blocks)
    return [block for block in blocks if not any(module in every for module in block.modules() if module is not block)]


def check(
    model: nn.Module,
    parts: Sequence[nn.Module],
    config: CompileConfig,
    *,
    engine: EngineConfig,
    casts: bool,
    device: torch.device | None,
) -> None:
    """Checks what is to be compiled, before there is a process group.

    Args:
        model: not wrapped yet.
        parts: of it, that are to be compiled.
        config: not ``none``.
        engine: its settings.
        casts: whether the model computes in 16 bits.
        device: to compile for; None where it is not this machine's.

    Raises:
        ConfigError: it cannot be compiled, or not exactly.
    """
    already = compiled_parts(model)
    if already:
        problem = f"and {shorten(already)} is compiled already"
        raise ConfigError("compile", config.name, problem, "Leave out one of the two: compile=, or torch.compile")
    if isinstance(engine, DeepSpeedConfig) and casts:
        problem = "on DeepSpeed in 16 bits, whose gradients accumulate in another format than the weights have"
        raise ConfigError("compile", config.name, problem, "Use precision=fp32 or tf32, or another engine")
    if isinstance(engine, DeepSpeedConfig) and engine.stage == _SHARDS_PARAMETERS:
        problem = "on DeepSpeed at engine.stage=3, which gathers the weights of each module within the forward"
        raise ConfigError("compile", config.name, problem, "Use engine.stage=0, 1 or 2, or engine=fsdp2")
    if engine.name == "fsdp2" and config.name == "model":
        problem = "on engine=fsdp2, which gathers the weights of each block within the model's forward"
        raise ConfigError("compile", config.name, problem, "Use compile=blocks, or engine=ddp or zero1")
    if engine.name == "fsdp2" and config.blocks:
        problem = "on engine=fsdp2, where the blocks that are sharded are compiled"
        raise ConfigError("compile.blocks", config.blocks, problem, "Name them as engine.blocks")
    if not parts:
        problem = f"and {type(model).__name__} has no blocks that could be told (the elements of a ModuleList)"
        key = "engine.blocks" if engine.name == "fsdp2" else "compile.blocks"
        raise ConfigError("compile", config.name, problem, f"Name them as {key}, or use compile=model")
    if not hasattr(DistributedDataParallel, "_inside_ddp_forward"):
        problem = f"torch {torch.__version__} has no DistributedDataParallel._inside_ddp_forward"
        raise ConfigError("compile", config.name, problem, "Use torch 2.8 to 2.15, or compile=none")
    try:
        torch.compile(_itself, backend="eager")
    except RuntimeError as error:  # of a platform or an interpreter
        raise ConfigError("compile", config.name, f"torch cannot compile: {error}", "Use compile=none") from error
    _counters()
    known = torch.compiler.list_backends(exclude_tags=())
    if config.backend not in known:
        problem = f"torch has no such backend, but {', '.join(known)}"
        raise ConfigError("compile.backend", config.backend, problem, f"Use {INDUCTOR}")
    if config.backend == INDUCTOR and device is not None:
        _check_compiler(device)


def _check_compiler(device: torch.device) -> None:
    """Inductor's own question, which it otherwise asks in the first forward."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton  # noqa: PLC0415  with inductor alone

        if not has_triton():
            problem = "needs Triton, which is not installed or does not know this GPU"
            raise ConfigError("compile.backend", INDUCTOR, problem, "Install triton, or use compile=none")
        return
    from torch._inductor import cpp_builder, exc  # noqa: PLC0415  seconds to import

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        problem = "needs a C++ compiler for the CPU, and finds none"
        raise ConfigError("compile.backend", INDUCTOR, problem, "Install g++, set CXX, or use compile=none") from error


def _counters() -> Mapping[str, Any]:
    from torch._dynamo import utils  # noqa: PLC0415  a second to import

    found = getattr(utils, "counters", None)
    if found is None:
        problem = f"torch {torch.__version__} has no torch._dynamo.utils.counters, which tell what is recompiled"
        raise ConfigError("compile", "on", problem, "Use torch 2.8 to 2.15, or compile=none")
    return found  # type: ignore[no-any-return]
