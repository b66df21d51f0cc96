"""What ``numerics=reproducible`` cannot promise the same bits of, found before there is a process group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from distaccum.config.engine import EngineConfig, FSDP2Config
from distaccum.engines.context import EngineContext
from distaccum.engines.rules import step_values
from distaccum.errors import ConfigError, shorten

_ENGINES = ("ddp", "zero1", "fsdp2")
_ROWS, _COLUMNS = 151, 7  # of a trial matrix: odd, so that a row ends in the midst of a vector


def check(model: nn.Module, context: EngineContext) -> None:
    """Raises ConfigError for settings and models whose sums depend on the ranks."""
    engine = context.engine
    if engine.name not in _ENGINES:
        problem = f"{engine.name} sums gradients over ranks in an order of its own"
        raise _refusal(problem, f"Use engine={', '.join(_ENGINES)}, or numerics=fast")
    if isinstance(engine, FSDP2Config):
        _check_fsdp2(engine)
    if context.compile.compiles:
        problem = f"compile={context.compile.name} makes other code for shapes that it has seen in another order"
        raise _refusal(problem, "Use compile=none, or numerics=fast")
    if any(_is_compiled(module) for module in model.modules()):
        problem = "the model is given to torch.compile, which makes other code for shapes seen in another order"
        raise _refusal(problem, "Give the model itself, or use numerics=fast")
    if context.policy.reduce_dtype is not torch.float32:
        problem = "gradients that travel in 16 bits are rounded as often as the ranks share them out"
        raise _refusal(problem, "Use precision.reduce_dtype=fp32, or numerics=fast")
    counting = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if (isinstance(module, _NormBase) and module.track_running_stats and module.training) or _synchronizes(module)
    ]
    if counting:
        problem = f"{shorten(counting, 1)} keeps statistics of the micro-batches that its rank has seen"
        raise _refusal(problem, "Use GroupNorm or LayerNorm, track_running_stats=False, or numerics=fast")


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _synchronizes(module: nn.Module) -> bool:
    return any("SyncBatchNorm" in base.__name__ for base in type(module).__mro__)


def _check_fsdp2(engine: FSDP2Config) -> None:
    settings = vars(engine)
    for key, wanted in (("sync", "boundary"), ("replicas", 1), ("offload", False)):
        if settings[key] != wanted:
            problem = f"engine.{key}={settings[key]} adds up gradients in an order that depends on the ranks"
            raise _refusal(problem, f"Use engine.{key}={wanted}, or numerics=fast")
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415  takes seconds

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        problem = f"torch {torch.__version__} has no way to say how engine=fsdp2 adds up gradients"
        raise _refusal(problem, "Use a newer torch, or engine=ddp")


def check_optimizers(optimizers: Iterable[Optimizer], engine: EngineConfig) -> None:
    """For engines that shard parameters: raises ConfigError for a rule that gives a part of a matrix other bits.

    Kernels of one pass (``fused``) may: they compute the last numbers of a tensor otherwise than those before.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(_ROWS, _COLUMNS, generator=generator)
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            device = group["params"][0].device
            rows = list(torch.split(whole.to(device), 1))
            given: list[list[list[Tensor]]] = [[[] for _ in optimizer.param_groups] for _ in range(2)]
            given[0][number], given[1][number] = [whole.to(device)], rows
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                found, parts = (step_values(optimizer, one, 1.0, seed=0) for one in given)
            if found is None or parts is None:
                problem = f"the rule of {kind} cannot be tried on a part of a matrix, and {engine.name} steps parts"
                raise _refusal(problem, "Use engine=ddp or zero1, or numerics=fast")
            same = torch.equal(found[number][0].detach(), torch.cat([part.detach() for part in parts[number]]))
            if same and not group.get("fused"):  # whose kernels differ in few elements, and not in every step
                continue
            problem = f"{kind} steps a part of a matrix to other bits than the whole, and {engine.name} steps parts"
            raise _refusal(problem, "Use optim.fused=false (fused=False), engine=ddp or zero1, or numerics=fast")


def _refusal(problem: str, remedy: str) -> ConfigError:
    return ConfigError("numerics", "reproducible", problem, remedy)
