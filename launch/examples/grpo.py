"""GRPO by hand on level 2: rollouts arrive in other numbers on each rank, and ``acc.window()`` makes windows of them::

    python launch/examples/grpo.py
    torchrun --standalone --nproc-per-node=2 launch/examples/grpo.py --engine fsdp2 --precision bf16

A tiny language model is rewarded for repeating a digit until its answer is full. Groups of answers that all have one
reward teach nothing and are left out, so that a rank may have any number of micro-batches, or none. Source: Z. Shao et
al., "DeepSeekMath" (2024); the loss is over all tokens of the window, as in Q. Yu et al., "DAPO" (2025).
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import Tensor

from distaccum import Accumulator
from distaccum.models.gpt import GPT

DIGITS, END, ANSWER = 10, 10, 4  # an answer has at most so many tokens; one that ends earlier is shorter
PROMPTS, GROUP, MICRO = 16, 8, 16  # prompts of an update over all ranks, answers to each, answers of a micro-batch
PASSES, CLIP, BETA = 2, 0.2, 0.02

parser = argparse.ArgumentParser(description="Train a tiny language model by GRPO.")
parser.add_argument("--updates", type=int, default=40, help="rollouts, of which each is trained on twice")
parser.add_argument("--engine", default="ddp")
parser.add_argument("--precision", default="fp32")
parser.add_argument("--lr", type=float, default=3e-3)
args = parser.parse_args()

torch.manual_seed(0)
model = GPT(vocab_size=DIGITS + 1, seq_len=1 + ANSWER, n_layer=1, n_head=2, n_embd=32, dropout=0.0)
reference = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
acc = Accumulator(
    model,
    optimizer,
    count=lambda batch: {"policy": int(batch["counts"].sum()), "kl": int(batch["counts"].sum())},
    clip_norm=1.0,
    engine=args.engine,
    precision=args.precision,
)
device, rank, ranks = acc.world.device, acc.world.rank, acc.world.size
reference.to(device)


def logprobs(of: Any, tokens: Tensor) -> Tensor:
    """The log-probability of each token of the answers, ``(answers, ANSWER)``."""
    with acc.engine.autocast():
        logits = of(tokens[:, :-1])
    return logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def rollout(update: int) -> tuple[list[dict[str, Tensor]], float]:
    """This rank's micro-batches, and the mean reward of its answers. Update and prompt alone say what is drawn."""
    acc.model.eval()
    numbers = range(rank, PROMPTS, ranks)
    generators = [torch.Generator().manual_seed(update * PROMPTS + number) for number in numbers]
    digits = torch.stack([torch.randint(DIGITS, (1,), generator=generator) for generator in generators])
    drawn = torch.stack([torch.rand(GROUP, ANSWER, generator=generator) for generator in generators])
    tokens = digits.repeat_interleave(GROUP, 0).to(device)
    for place in range(ANSWER):
        with acc.engine.autocast():
            logits = acc.model(tokens)[:, -1]
        below = logits.float().softmax(-1).cumsum(-1)
        chosen = torch.searchsorted(below, drawn[..., place].reshape(-1, 1).contiguous().to(device)).clamp(max=DIGITS)
        tokens = torch.cat((tokens, chosen), 1)
    answers = tokens[:, 1:]
    ended = (answers == END).long().cumsum(1)
    counts = ended - (answers == END).long() == 0  # up to the first END, and with it
    rewards = ((answers == tokens[:, :1]) & (ended == 0)).float().mean(1).view(-1, GROUP)
    spread = rewards.std(1, keepdim=True)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-4)).view(-1)
    batch = {"tokens": tokens, "counts": counts, "advantages": advantages, "old": logprobs(acc.model, tokens)}
    batch["reference"] = logprobs(reference, tokens)
    teaches = (spread > 0).repeat_interleave(GROUP, 0).view(-1)
    batch = {name: value[teaches] for name, value in batch.items()}
    parts = zip(*(value.split(MICRO) for value in batch.values()), strict=True)
    found = [dict(zip(batch, part, strict=True)) for part in parts] if bool(teaches.any()) else []
    acc.model.train()
    return found, float(rewards.mean())


def losses(of: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over the tokens that count: the clipped objective, and the distance to the reference policy."""
    now, advantages = logprobs(of, batch["tokens"]), batch["advantages"][:, None]
    ratio = (now - batch["old"]).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    apart = batch["reference"] - now
    return {
        "policy": (policy * batch["counts"]).sum(),
        "kl": BETA * ((apart.exp() - apart - 1) * batch["counts"]).sum(),
    }


for update in range(args.updates):
    micro_batches, reward = rollout(update)
    loss = 0.0
    for _ in range(PASSES):
        window = acc.window(micro_batches)
        for micro in window:
            with acc.accumulate():
                acc.backward(losses(acc.model, micro.batch))
        loss = acc.mean_loss() if window else 0.0
    (rewards,) = acc.world.all_reduce_host([reward * len(range(rank, PROMPTS, ranks))])
    if acc.world.is_main and (update + 1) % 5 == 0:
        print(f"update {update + 1}: reward {rewards / PROMPTS:.4f}, loss {loss:.7f}, {acc.progress.step} steps")
