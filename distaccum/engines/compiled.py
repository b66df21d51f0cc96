"""Compiled forwards: ``torch.compile`` inside of what an engine wraps, of the model or of each of its blocks.

With them what the loss makes of the model's output: for whole logits the largest tensors of a micro-step.

A module's ``forward`` is compiled, and not its ``__call__``: the hooks on it, an engine's among them, stay outside of
the graph, and names in checkpoints are the model's own. What is communicated between two blocks is never traced.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from distaccum.config.compile import INDUCTOR, WITH_GRAPHS, CompileConfig
from distaccum.config.engine import DeepSpeedConfig, EngineConfig
from distaccum.engines.context import EngineContext
from distaccum.errors import ConfigError, MisuseError, shorten
from distaccum.losses.base import Compilable

# A method that runs compiled: in the place of a module's ``forward``, or of what a loss makes of an output.


class CompiledMethod:
    """In the place of a method of an object, as a module's ``forward``. A copy of the object has the plain one.

    Args:
        owner: whose method it is.
        name: of the method.
        config: says how it is compiled.
    """

    def __init__(self, owner: Any, name: str, config: CompileConfig) -> None:
        self._owner, self._name, self._own = owner, name, name in vars(owner)
        self.plain: Callable[..., Any] = getattr(owner, name)
        self._compiled = self._compile(config, config.mode)
        update_wrapper(self, self.plain)
        vars(owner)[name] = self

    def _compile(self, config: CompileConfig, mode: str) -> Callable[..., Any]:
        options: Any = {"mode": mode} if config.backend == INDUCTOR else {}
        dynamic = None if config.dynamic == "auto" else config.dynamic
        return torch.compile(self.plain, backend=config.backend, dynamic=dynamic, fullgraph=config.fullgraph, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (self.plain,)

    def undo(self) -> None:
        """Gives the object its plain method back, unless somebody has put another one there."""
        if vars(self._owner).get(self._name) is self:
            del vars(self._owner)[self._name]
            if self._own:
                vars(self._owner)[self._name] = self.plain


class GraphedForward(CompiledMethod):
    """A module's ``forward``, in a micro-step as torch's tree of CUDA graphs, and otherwise as code without graphs.

    What a graph returns lies in memory that the next micro-step's graph writes, of which torch says nothing once it
    replays: what leaves the module is a copy. Gradients of parameters need none, as buckets are added to in place.

    Args:
        module: whose forward it is.
        config: says how it is compiled.
        in_micro_step: whether a forward is one of a micro-step, and its backward not over.
    """

    def __init__(self, module: nn.Module, config: CompileConfig, in_micro_step: Callable[[], bool]) -> None:
        super().__init__(module, "forward", config)
        self._in_micro_step = in_micro_step
        self._graphed = self._compile(config, WITH_GRAPHS[config.mode])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._in_micro_step() and torch.is_grad_enabled()):
            return self._compiled(*args, **kwargs)
        return copied(self._graphed(*args, **kwargs), self._owner, (args, kwargs))


def copied(output: Any, module: nn.Module, given: Any) -> Any:
    """``output`` without the memory of graphs; what shares its memory with an input is the caller's, and stays so.

    Raises:
        MisuseError: a part of it is neither a tensor nor a plain value, so that nobody knows what it holds.
    """
    inputs = {one.untyped_storage().data_ptr() for one in tree_leaves(given) if isinstance(one, Tensor)}

    def copy(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part if part.untyped_storage().data_ptr() in inputs else part.clone()
        if part is None or isinstance(part, bool | int | float | str):
            return part
        problem = (
            f"{type(module).__name__} returns a {type(part).__name__}, whose tensors the next micro-step overwrites"
        )
        raise MisuseError(f"{problem}: return tensors in tuples, lists and dictionaries, or use compile.graphs=false")

    return tree_map(copy, output)


class CompiledCriterion(CompiledMethod):
    """What a loss makes of the model's output, and of nothing else that is compiled or that an engine wraps."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, nn.Module) for one in (*args, *kwargs.values())):
            problem = f"{type(self._owner).__name__}.{self._name} is named by to_compile, and called with a module"
            raise MisuseError(
                f"{problem}: name what computes the loss of the model's output, or use compile.loss=false"
            )
        return super().__call__(*args, **kwargs)


def _plain(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


_log = logging.getLogger(__name__)

_WARM_UP = 2  # windows that compile what the later ones run
_MANY = 8  # graphs after that: as many as torch makes of one function before it runs the rest uncompiled
_SHARDS_PARAMETERS = 3  # the stage of DeepSpeed that does


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
        self._config, self._in_micro_step = config, False
        self._skips_before = self._skips()
        self._methods: list[CompiledMethod] = (
            [GraphedForward(module, config, lambda: self._in_micro_step) for module in modules]
            if config.graphs
            else [CompiledMethod(module, "forward", config) for module in modules]
        )

    def add_loss(self, loss: object) -> None:
        """Compiles what a loss names, before the first window; raises what :func:`check_loss` does."""
        check_loss(loss, self._config)
        if name := criterion_of(loss, self._config):
            owner: Any = getattr(loss, name)
            module = isinstance(owner, nn.Module)
            criterion = CompiledCriterion(owner if module else loss, "forward" if module else name, self._config)
            self._methods.append(criterion)

    def window_began(self) -> None:
        """Called before a window's first micro-step."""
        self._before = self._made()

    def micro_step_began(self) -> None:
        """Called before its forward, by engines that can have graphs: what those before gave may be overwritten."""
        if self._config.graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            self._in_micro_step = True

    def backward_ended(self) -> None:
        """Called after it: forwards that follow are no micro-step's."""
        self._in_micro_step = False

    def window_ended(self) -> None:
        """Called after its step."""
        self._in_micro_step = False
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
        _log.info("compiled %d graphs of %d parts in the first steps", self.graphs, len(self._methods))
        if not self.graphs:
            problem = "compile is on, and nothing was compiled"
            _log.warning("%s: torch runs the forward as it is, or has compiled it before in this process", problem)
        elif reasons:
            remedy = "TORCH_LOGS=graph_breaks shows where, compile.fullgraph=true makes it an error"
            _log.warning("the compiled forward is in several graphs (%s): %s", shorten(reasons), remedy)
        if self._config.graphs and (skips := self._skips() - self._skips_before):
            remedy = "TORCH_LOGS=cudagraphs says why"
            _log.warning("compile.graphs=true, and %d graphs run without being captured: %s", skips, remedy)

    def _tell_many(self) -> None:
        remedy = "give micro-batches one shape" + ("" if self._dynamic is True else ", or use compile.dynamic=true")
        problem = "after its eighth version torch runs a function uncompiled"
        _log.warning(
            "%d graphs compiled after the first steps: %s. TORCH_LOGS=recompiles says why; %s",
            self.recompiles,
            problem,
            remedy,
        )

    def _made(self) -> int:
        return int(self._counters["stats"]["unique_graphs"])

    def _skips(self) -> int:
        return int(self._counters["inductor"]["cudagraph_skips"])

    def _breaks(self) -> dict[str, int]:
        return dict(self._counters["graph_break"])

    def undo(self) -> None:
        """Gives every module its plain forward back, and the loss its own method."""
        for method in self._methods:
            method.undo()
        self._methods = []


def criterion_of(loss: object, config: CompileConfig) -> str:
    """The name of what is compiled of a loss; empty: nothing."""
    return loss.to_compile if config.compiles and config.loss and isinstance(loss, Compilable) else ""


def check_loss(loss: object, config: CompileConfig) -> None:
    """Checks what a loss says of itself that can be compiled.

    Raises:
        ConfigError: it names no attribute of its own that is called, or one in whose place none can be put.
    """
    name: Any = criterion_of(loss, config)
    if name == "":
        return
    shown, remedy = type(loss).__name__, 'Name a method, as in to_compile = "of_logits", or use compile.loss=false'
    if not isinstance(name, str) or name.startswith("__") or not callable(getattr(loss, name, None)):
        raise ConfigError(f"loss {shown}.to_compile", name, "names nothing of it that its __call__ could call", remedy)
    part = getattr(loss, name)
    if compiled_parts(part) if isinstance(part, nn.Module) else _runs_compiled(part):
        raise ConfigError(f"loss {shown}.to_compile", name, "is compiled already", "Leave out one of the two")
    if not hasattr(loss, "__dict__") or isinstance(getattr(type(loss), name, None), property):
        problem = "cannot be replaced in it, which has __slots__ or makes it a property"
        raise ConfigError(f"loss {shown}.to_compile", name, problem, remedy)


def compiled_parts(model: nn.Module) -> list[str]:
    """The names of the modules whose forward is compiled, by whomever; the model itself is ``the model``."""
    return [name or "the model" for name, module in model.named_modules() if _is_compiled(module)]


class _Uncompiled:
    """Counts blocks: torch has one stance for all threads, and each would put back what another has set."""

    def __init__(self) -> None:
        self._lock, self._blocks = Lock(), 0
        self._stance: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks and "torch._dynamo" in sys.modules:  # else nothing has been compiled
                self._stance = torch.compiler.set_stance("force_eager")
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._stance.__exit__(None, None, None)
                self._stance = nullcontext()


uncompiled = _Uncompiled()
"""Within the block what is compiled runs as it was written: of a model, of a loss, of a library."""


# Before torch 2.10 each call in a mode would compile anew, to no use: after eight, never again, or with an error.
_KNOWS_MODES = hasattr(torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals")
_BESIDE = nullcontext() if _KNOWS_MODES else uncompiled


class BesideCompiled(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """A mode that compiled code does not see, and runs compiled in; before torch 2.10 as it was written.

    Torch runs uncompiled what is compiled in another mode of its users', in that mode and ever after.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        _BESIDE.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _BESIDE.__exit__(None, None, None)


def _is_compiled(module: nn.Module) -> bool:
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        return True
    return _runs_compiled(vars(module).get("forward"))


def _runs_compiled(method: object) -> bool:
    return isinstance(method, CompiledMethod) or hasattr(method, "_torchdynamo_orig_callable")


def check(model: nn.Module, parts: Sequence[nn.Module], context: EngineContext) -> None:
    """Checks what is to be compiled, before there is a process group.

    Args:
        model: not wrapped yet.
        parts: of it, that are to be compiled.
        context: the settings, by which something is compiled.

    Raises:
        ConfigError: it cannot be compiled, or not exactly.
    """
    config, engine = context.compile, context.engine
    device = None if context.planned else context.device  # planned: perhaps not this machine's
    already = compiled_parts(model)
    if already:
        problem = f"and {shorten(already)} is compiled already"
        raise ConfigError("compile", config.name, problem, "Leave out one of the two: compile=, or torch.compile")
    if isinstance(engine, DeepSpeedConfig) and context.policy.casts:
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
    if config.graphs:
        _check_graphs(engine, device)
    if not parts:
        problem = f"and {type(model).__name__} has no blocks that could be told (the elements of a ModuleList)"
        key = "engine.blocks" if engine.name == "fsdp2" else "compile.blocks"
        raise ConfigError("compile", config.name, problem, f"Name them as {key}, or use compile=model")
    if not hasattr(DistributedDataParallel, "_inside_ddp_forward"):
        problem = f"torch {torch.__version__} has no DistributedDataParallel._inside_ddp_forward"
        raise ConfigError("compile", config.name, problem, "Use torch 2.8 to 2.15, or compile=none")
    try:
        torch.compile(lambda: None, backend="eager")
    except RuntimeError as error:  # of a platform or an interpreter
        raise ConfigError("compile", config.name, f"torch cannot compile: {error}", "Use compile=none") from error
    _counters()
    known = torch.compiler.list_backends(exclude_tags=())
    if config.backend not in known:
        problem = f"torch has no such backend, but {', '.join(known)}"
        raise ConfigError("compile.backend", config.backend, problem, f"Use {INDUCTOR}")
    if config.backend == INDUCTOR and device is not None:
        _check_compiler(device)


def _check_graphs(engine: EngineConfig, device: torch.device | None) -> None:
    """CUDA graphs, whose weights and gradients have to stay where they are."""
    remedy = "Leave it out"
    if engine.name not in ("ddp", "zero1"):
        problem = f"on engine={engine.name}, whose weights or gradients move between micro-steps"
        raise ConfigError("compile.graphs", True, problem, f"{remedy}, or use engine=ddp or zero1")
    if getattr(engine, "find_unused_parameters", False):
        problem = "and engine.find_unused_parameters=true, with which micro-steps differ"
        raise ConfigError("compile.graphs", True, problem, "Leave one of them out")
    if device is not None and device.type != "cuda":
        raise ConfigError("compile.graphs", True, f"on a {device.type.upper()}, which has no CUDA graphs", remedy)


def _check_compiler(device: torch.device) -> None:
    """Inductor's own question, which it otherwise asks in the first forward."""
    if device.type != "cpu":
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
