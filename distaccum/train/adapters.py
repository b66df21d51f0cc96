"""Models with adapters by PEFT: what of them is saved, and what tells their frozen base from another."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.checkpoint.files import begin_digest, digest_text
from distaccum.engines.modules import clean, trained
from distaccum.engines.state import leave_frozen_out, names_set_aside
from distaccum.errors import ConfigError

_ROWS = 2**24  # elements that are hashed at once


def set_base_aside(model: nn.Module) -> None:
    """Has checkpoints hold the adapters alone, of a model of PEFT that trains one adapter and nothing else.

    Other models are left as they are: all of them is saved.
    """
    if _names(model) is not None:
        leave_frozen_out(model)


def facts(model: nn.Module) -> dict[str, Any]:
    """What a checkpoint says of the base that it does not hold, and of the adapter; empty for other models.

    ``base`` and ``digest`` name the base and its weights, ``names`` are those of the adapter's tensors in PEFT's files,
    and ``config`` is PEFT's description of the adapter.
    """
    names = _names(model) if names_set_aside(model) else None
    if names is None:
        return {}
    config = _config(model)
    base = config.get("base_model_name_or_path")
    return {"base": base, "digest": _digest(model), "names": names, "config": config}


def check_base(saved: Mapping[str, Any], now: Mapping[str, Any], path: object) -> None:
    """Refuses adapters over another base than theirs.

    Args:
        saved: the facts of a checkpoint.
        now: those of a run that would resume from it.
        path: of the checkpoint.

    Raises:
        ConfigError: the weights of the base differ, or only one of the two has adapters.
    """
    before, here = saved.get("adapters") or {}, now.get("adapters") or {}
    if not now or before.get("digest") == here.get("digest"):
        return
    name = here.get("base")
    if not before or not here:
        problem = f"{path} was saved {'with' if before else 'without'} adapters"
        raise ConfigError("model", name, problem, f"Resume it {'with' if before else 'without'} them")
    made = [str(one.get("digest")).partition(":")[0] for one in (before, here)]
    if made[0] != made[1]:  # of machines with and without blake3
        problem = f"{path} knows the weights of {before['base']} by {made[0]}, and this machine by {made[1]}"
        raise ConfigError("model.name", name, problem, "Have blake3 on both or on none: pip install blake3")
    problem = f"its weights are others than those of {before['base']}, which the adapters in {path} were trained over"
    raise ConfigError("model.name", name, problem, "Give the same base, or begin anew with init_from")


def _names(model: nn.Module) -> dict[str, str] | None:
    """What PEFT calls each trained parameter; None unless the model trains one adapter of PEFT and nothing else.

    Raises:
        ConfigError: this version of PEFT has not what is read of it.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    try:
        active, adapters = model.active_adapters, list(model.peft_config)
        if list(active) != adapters or len(adapters) != 1 or model.peft_config[adapters[0]].is_prompt_learning:
            return None
        theirs = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"peft {peft.__version__} tells its adapters in another way ({error})"
        raise ConfigError("model", "peft", problem, "Install the version of requirements-dev.lock") from error
    places = {_place(tensor): name for name, tensor in theirs.items()}
    names = {name: places.get(_place(parameter.detach())) for name, parameter in trained(model).items()}
    if len(names) != len(theirs) or not all(names.values()):
        return None
    return {name: str(given) for name, given in names.items()}


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape


def _config(model: nn.Module) -> dict[str, Any]:
    """As ``adapter_config.json`` has it."""
    (config,) = model.peft_config.values()  # type: ignore[operator]
    values = {**config.to_dict(), "inference_mode": True}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
    return plain


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


@torch.no_grad()
def _digest(model: nn.Module) -> str:
    """Of the names, types, shapes and bytes of all that is frozen."""
    made = begin_digest()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            continue
        made.update(f"{clean(name)} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().contiguous().view(-1)
        for part in torch.split(flat, _ROWS):
            made.update(part.cpu().view(torch.uint8).numpy().data)
    return digest_text(made)
