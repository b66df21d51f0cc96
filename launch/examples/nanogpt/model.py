"""A GPT with the interface of nanoGPT's ``model.py``, and the loss that makes it a model of distaccum's.

Yours may stand in its place: all that is used of it is ``GPT(config)``, and ``forward(idx, targets)`` that returns
``(logits, loss)``, the loss a mean over the targets that are not -1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum.functional import count_labels, from_mean


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class Block(nn.Module):
    """Attention and a feed-forward layer on normalised residuals; ``(B, T, C)`` to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head, self.dropout = config.n_head, config.dropout
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=config.bias) for _ in range(2))
        self.c_attn = nn.Linear(width, 3 * width, bias=config.bias)
        self.attn_proj = nn.Linear(width, width, bias=config.bias)
        self.c_fc = nn.Linear(width, 4 * width, bias=config.bias)
        self.mlp_proj = nn.Linear(4 * width, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.c_attn(self.ln_1(x)).view(batch, length, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=drop, is_causal=True)
        mixed = self.attn_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + F.dropout(self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """``model(idx, targets)``: logits and the mean loss; ``model(idx)``: the last position's logits, and None."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                depth = 2 * config.n_layer if name.endswith("_proj.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.AdamW:
        """AdamW; what has two dimensions or more decays, norms and biases do not."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type == "cuda")

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """``idx`` of shape ``(B, T)``, continued by so many tokens."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size :])[0][:, -1] / temperature
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, [-1]]
                logits = logits.masked_fill(logits < least, -math.inf)
            idx = torch.cat((idx, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        return idx


class NextToken:
    """The loss that the model itself returns, a mean, as the sum and the count that distaccum divides by."""

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return count_labels(batch[1], ignore_index=-1)

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        _, mean = model(*batch)
        return from_mean(mean, (batch[1] != -1).sum())  # on its device: the host does not wait
