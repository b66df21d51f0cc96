"""Adapters (LoRA, by PEFT) for a model of Hugging Face transformers: their settings, and how they are put in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from distaccum.config.extras import install_command
from distaccum.errors import ConfigError, near_misses
from distaccum.models.pretrained import cast

LORA = {"r": None, "alpha": 16, "dropout": 0.0, "target_modules": None, "modules_to_save": None}


def adapters(lora: Mapping[str, Any], base_dtype: str) -> Callable[[nn.Module, str], nn.Module] | None:
    """What puts adapters of these settings into a model, given it and PEFT's name of its task; None: there are none.

    Args:
        lora: settings under PEFT's names, as ``model.lora`` has them.
        base_dtype: what the weights below are held in.

    Raises:
        ConfigError: no such setting, or values that do not go together; and where they are put in: PEFT is not
            installed, or cannot give the model such adapters.
    """
    for key, value in lora.items():
        if key not in LORA:
            problem = f"no such setting{near_misses(key, LORA)}"
            raise ConfigError(f"model.lora.{key}", value, problem, f"Use {', '.join(LORA)}, or make the model yourself")
    found = {**LORA, **lora}
    for key in ("r", "alpha"):
        value = found[key]
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"model.lora.{key}", value, "is no positive whole number", "Give one, as 8")
    if type(found["dropout"]) not in (int, float) or not 0 <= found["dropout"] < 1:
        raise ConfigError("model.lora.dropout", found["dropout"], "is no share below 1", "Give one, as 0.05")
    if base_dtype not in ("fp32", "bf16"):
        raise ConfigError("model.base_dtype", base_dtype, "no such format", "Use fp32 or bf16")
    if found["r"] is not None:
        return partial(_adapted, found)
    stated = next((key for key in LORA if found[key] != LORA[key]), None)
    if stated is not None:
        problem = "and model.lora.r is null, so that there are no adapters"
        raise ConfigError(f"model.lora.{stated}", found[stated], problem, "Add model.lora.r=8")
    if base_dtype != "fp32":
        problem = "and model.lora.r is null, so that the weights are trained, in fp32"
        raise ConfigError("model.base_dtype", base_dtype, problem, "Add model.lora.r=8, or use precision=bf16")
    return None


def _adapted(lora: Mapping[str, Any], model: nn.Module, task: str) -> nn.Module:
    try:
        import peft  # noqa: PLC0415  an optional extra
    except ImportError as error:
        remedy = f"Run {install_command('adapters')}"
        raise ConfigError("model.lora.r", lora["r"], "peft is not installed", remedy) from error
    try:
        config = peft.LoraConfig(
            task_type=task,
            r=lora["r"],
            lora_alpha=lora["alpha"],
            lora_dropout=float(lora["dropout"]),
            target_modules=lora["target_modules"],
            modules_to_save=lora["modules_to_save"],
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT's, of transformers
            made: nn.Module = peft.get_peft_model(model, config)
    except (ValueError, TypeError, KeyError) as error:
        remedy = "Name layers as the model has them, as [q_proj,v_proj], or all-linear"
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError("model.lora.target_modules", lora["target_modules"], problem, remedy) from error
    cast((parameter for parameter in made.parameters() if parameter.requires_grad), torch.float32)
    return made
