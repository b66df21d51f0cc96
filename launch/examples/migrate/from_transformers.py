"""A Trainer of Hugging Face; docs/own-loop.md changes it."""

from __future__ import annotations

import os

import torch
from common import collate, text
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

data = [{"input_ids": inputs, "labels": inputs} for inputs, _ in text()]


def batch(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    inputs, labels = collate([(sample["input_ids"], sample["labels"]) for sample in samples])
    return {"input_ids": inputs, "labels": labels}


torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=32, use_cache=False, **sizes))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8 // int(os.environ.get("WORLD_SIZE", "1")),
        num_train_epochs=1,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=data,
    eval_dataset=data[:64],
    data_collator=batch,
)
trainer.train()
torch.save(model.state_dict(), "weights.pt")
