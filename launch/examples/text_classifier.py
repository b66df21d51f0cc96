"""Fine-tune a Hugging Face text classifier on a file of labelled texts, on any number of processes::

    python launch/examples/text_classifier.py launch/examples/reviews.csv
    torchrun --nproc-per-node=2 launch/examples/text_classifier.py launch/examples/reviews.csv
    python launch/examples/text_classifier.py my_reviews.jsonl --pretrained distilbert-base-uncased --lr 5e-5

The file has columns ``text`` and ``label``. The 400 reviews of ``reviews.csv`` are made up: put together from
templates, so that a tiny model can tell them apart. Needs ``pip install 'distaccum[hf]'``.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForSequenceClassification, BertConfig

from distaccum import RunConfig, SequenceClassification, Trainer
from distaccum.data.datasets.labelled import labelled

parser = argparse.ArgumentParser(description="Fine-tune a text classifier.")
parser.add_argument("path", help="CSV, JSON-lines or Parquet file with columns text and label")
parser.add_argument("--pretrained", metavar="NAME", help="model and tokenizer; default: a tiny one, untrained")
parser.add_argument("--global-size", type=int, default=32, help="texts per optimizer step, over all processes")
parser.add_argument("--micro-size", type=int, default=8, help="the most texts of one forward/backward on one process")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--run-dir", help="default: a new folder below runs/")


def main() -> None:
    args = parser.parse_args()
    data = labelled(path=args.path, tokenizer=args.pretrained)
    classes = {"num_labels": len(data.classes), "id2label": dict(enumerate(data.classes)), "pad_token_id": data.pad_id}
    torch.manual_seed(0)
    if args.pretrained:
        model = AutoModelForSequenceClassification.from_pretrained(args.pretrained, **classes)
    else:
        config = BertConfig(
            vocab_size=data.vocab_size,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            **classes,
        )
        model = AutoModelForSequenceClassification.from_config(config)
    settings = {
        "batch": {"group_by_length": True},
        "optim": {"lr": args.lr},
        "schedule": {"warmup_steps": args.steps // 10},
        "trainer": {"eval_every": 20},
        "metrics": {"wandb": {"mode": "disabled"}},
    }
    Trainer(
        model,
        SequenceClassification(),
        data,
        global_batch_size=args.global_size,
        micro_batch_size=args.micro_size,
        max_steps=args.steps,
        run_dir=args.run_dir,
        config=RunConfig.from_dict(settings),
    ).fit()


if __name__ == "__main__":
    main()
