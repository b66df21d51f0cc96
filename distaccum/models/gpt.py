"""A small GPT: pre-norm transformer blocks, scaled dot-product attention, rotary positions, tied embeddings.

Source: A. Radford et al., "Language models are unsupervised multitask learners" (2019), for the layout and for scaling
the initial weights of residual projections by the depth; J. Su et al., "RoFormer" (2021), for the positions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum.errors import ConfigError


class GPT(nn.Module):
    """Token ids ``(B, T)`` to logits ``(B, T, vocab_size)``.

    Args:
        vocab_size: number of token ids.
        seq_len: the longest T.
        n_layer: blocks.
        n_head: attention heads; divides ``n_embd``.
        n_embd: width.
        dropout: share of activations dropped in training.
    """

    def __init__(
        self, *, vocab_size: int, seq_len: int, n_layer: int, n_head: int, n_embd: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "seq_len": seq_len, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"model.{name}", size, "must be at least 1", "Give a positive size")
        if n_embd % n_head:
            remedy = "Make the width a multiple of the number of heads"
            raise ConfigError("model.n_embd", n_embd, f"not divisible by model.n_head={n_head}", remedy)
        if n_embd // n_head % 2:
            remedy = "Rotary positions turn pairs of channels: make the width of a head even"
            raise ConfigError("model.n_embd", n_embd, f"gives heads of odd width {n_embd // n_head}", remedy)
        if not 0 <= dropout < 1:
            raise ConfigError("model.dropout", dropout, "not in [0, 1)", "Give the share of activations to drop")
        self.seq_len = seq_len
        self.tokens = TokenEmbedding(vocab_size, n_embd)
        self.rotation = Rotation(seq_len, n_embd // n_head)
        self.dropout = nn.Dropout(dropout)
        blocks = [Block(n_embd, n_head, dropout, depth=n_layer) for _ in range(n_layer)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.apply(_initialise)
        for block in blocks:
            block.scale_residuals()

    def forward(self, ids: Tensor) -> Tensor:
        """Raises ValueError if the sequence is longer than ``seq_len``."""
        length = ids.shape[1]
        if length > self.seq_len:
            raise ValueError(f"a sequence of {length} tokens, but the model was built for seq_len={self.seq_len}")
        x = self.dropout(self.tokens(ids))
        angles = self.rotation(length)
        for block in self.blocks:
            x = block(x, angles)
        logits: Tensor = F.linear(self.norm(x), self.tokens.weight)
        return logits


class TokenEmbedding(nn.Embedding):
    """With small initial weights, as they are the output's too."""

    def reset_parameters(self) -> None:
        _initialise(self)


Angles = tuple[Tensor, Tensor]


class Rotation(nn.Module):
    """Cosine and sine, each ``(T, head_width / 2)``, of the angle by which a pair of channels turns at a position."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, seq_len: int, head_width: int) -> None:
        super().__init__()
        self._sizes = seq_len, head_width
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(seq_len, head_width // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Computes the buffers, also after the meta device."""
        seq_len, head_width = self._sizes
        device = self.cosine.device
        frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2, device=device) / head_width)
        angles = torch.outer(torch.arange(seq_len, device=device), frequencies)
        self.cosine, self.sine = angles.cos(), angles.sin()

    def forward(self, length: int) -> Angles:
        return self.cosine[:length], self.sine[:length]


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turns the channel pairs of ``x``, ``(..., T, head_width)``, by their positions' angles."""
    cosine, sine = (part.to(x.dtype) for part in angles)  # x is 16 bits wide under autocast
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a normalised residual; ``(B, T, C)`` to the same."""

    def __init__(self, n_embd: int, n_head: int, dropout: float, *, depth: int) -> None:
        super().__init__()
        self._depth = depth
        self.attention_norm = nn.LayerNorm(n_embd, bias=False)
        self.attention = Attention(n_embd, n_head, dropout)
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.expand = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.contract = nn.Linear(4 * n_embd, n_embd, bias=False)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Makes the weights of all that is inside, after the meta device."""
        self.apply(_initialise)
        self.scale_residuals()

    def scale_residuals(self) -> None:
        """Draws the projections into the residual stream again, the smaller the deeper the model."""
        for projection in (self.attention.project, self.contract):
            nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * self._depth))

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        fed: Tensor = self.dropout(self.contract(F.gelu(self.expand(self.norm(x)))))
        return x + fed


class Attention(nn.Module):
    """Causal multi-head self-attention; ``(B, T, C)`` to the same."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.n_head = n_head
        self.query_key_value = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.project = nn.Linear(n_embd, n_embd, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.n_head, width // self.n_head)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            rotate(query, angles), rotate(key, angles), value, dropout_p=drop, is_causal=True
        )
        return F.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)), drop, self.training)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
