"""Run by torchrun, FOLDER MODE: engines that shard, ``whole``, or in ``parts`` from the middle checkpoints of these."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import CausalLM, CrossEntropy, DataSpec, PadCollator, RunConfig, Trainer
from tests.support.packing import documents, make_model, spec

ENGINES: dict[str, dict[str, Any]] = {
    "zero1": {"name": "zero1"},
    "fsdp2": {"name": "fsdp2"},
    "deepspeed": {"name": "deepspeed", "stage": 2},
}
UPDATES = 6
_VOCABULARY = 40


def packed() -> tuple[nn.Module, Any, DataSpec, dict[str, Any]]:
    """Documents in shared rows, in another order each epoch of four windows, and dropout."""
    data = replace(spec([*documents(), *documents()[:7]]), shuffle=True)
    return make_model(dropout=0.1), CrossEntropy(), data, {"batch": {"packing": "documents"}}


def adapters() -> tuple[nn.Module, Any, DataSpec, dict[str, Any]]:
    """LoRA on a tiny Llama, with dropout of what adapters see."""
    import peft  # noqa: PLC0415  an optional extra
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  likewise

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, use_cache=False, **sizes))
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(_VOCABULARY, (5 + i % 4,), generator=generator) for i in range(20)]
    samples: list[dict[str, Tensor]] = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows
    ]
    pad = PadCollator({"input_ids": 0, "attention_mask": 0, "labels": -100})
    return peft.get_peft_model(base, lora), CausalLM(), DataSpec(train=samples, eval_dataset=None, collate=pad), {}


MODES = {"packing": packed, "adapters": adapters}


def main(folder: Path, mode: str, part: str) -> None:
    for name, engine in ENGINES.items():
        model, loss, data, settings = MODES[mode]()
        middle = folder / "whole" / name / "checkpoints" / f"step-{UPDATES // 2}"
        config = {
            "batch": {"global_size": 5, "micro_size": 2, **settings.get("batch", {})},
            "engine": engine,
            "resume": str(middle) if part == "parts" else "never",
            "optim": {"lr": 1e-2},
            "schedule": {"_target_": "distaccum.train.schedules.Constant"},
            "trainer": {"log_every": 1, "eval_every": 0, "max_steps": UPDATES},
            "checkpoint": {"every": UPDATES // 2, "keep": 0},
            "metrics": {"console": False, "wandb": {"mode": "disabled"}},
        }
        run_dir = folder / part / name
        Trainer(model, loss, data, run_dir=run_dir, config=RunConfig.from_dict(config)).fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
