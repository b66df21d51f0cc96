"""A LightningModule and its Trainer; docs/own-loop.md changes them."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from common import Net, Sample, collate, text
from torch import Tensor
from torch.utils.data import DataLoader


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def loss(self, batch: Sample) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)

    def training_step(self, batch: Sample, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Sample, _: int) -> None:
        self.log("eval_loss", self.loss(batch))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


torch.manual_seed(0)
model = Language()
data = text()
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    accumulate_grad_batches=8,
    gradient_clip_val=1.0,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(
    model, DataLoader(data, batch_size=8, collate_fn=collate), DataLoader(data[:64], batch_size=8, collate_fn=collate)
)
print(f"eval_loss {trainer.callback_metrics['eval_loss']:.6f}")
torch.save(model.net.state_dict(), "weights.pt")
