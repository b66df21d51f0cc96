"""Experts whose loads are balanced over a whole window: a loss that represents a batch, beside a sum over samples."""

import torch
import torch.nn.functional as F
from torch import nn

from distaccum import Accumulator

EXPERTS = 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, EXPERTS), nn.Linear(6, EXPERTS)

    def forward(self, x):
        likely = self.router(x).softmax(-1)
        best = likely.argmax(-1, keepdim=True)
        return (self.experts(x) * likely).gather(-1, best).squeeze(-1), likely


class Balanced:
    """Squared errors, and the load-balancing loss of Switch Transformers over the window's tokens."""

    def count(self, batch):
        return {"task": len(batch[0]), "balance": len(batch[0])}

    def represent(self, model, batch):
        x, y = batch
        output, likely = model(x)
        dealt = F.one_hot(likely.argmax(-1), EXPERTS).sum(0, keepdim=True)
        return {"errors": (output - y).square().sum().reshape(1), "dealt": dealt, "likely": likely.sum(0, keepdim=True)}

    def __call__(self, representations):
        dealt, likely = representations["dealt"].sum(0), representations["likely"].sum(0)
        tokens = dealt.sum()
        balance = EXPERTS * (dealt / tokens * likely / tokens).sum()
        return {"task": representations["errors"].sum(), "balance": 0.01 * balance * tokens}  # divided by the counts


torch.manual_seed(0)
x = torch.randn(96, 6)
data, model, loss = list(zip(x, x.prod(1), strict=True)), Experts(), Balanced()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
acc = Accumulator(model, optimizer, global_batch_size=32, micro_batch_size=4, count=loss.count)
for window in acc.windows(data):
    acc.step(window, loss)
    print(acc.mean_loss())
