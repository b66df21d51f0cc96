"""A small convolutional classifier for small images."""

from __future__ import annotations

from torch import Tensor, nn

from distaccum.errors import ConfigError, MisuseError, kinds_of

_DIMENSIONS = 4


class CNN(nn.Module):
    """Images ``(B, 1, H, W)`` to logits ``(B, classes)``. Without batch normalisation, whose statistics would depend on
    the micro-batch.

    Args:
        channels: Channels of the first convolution.
        classes: Number of labels.
    """

    def __init__(self, *, channels: int, classes: int) -> None:
        super().__init__()
        for name, size in (("channels", channels), ("classes", classes)):
            if size < 1:
                raise ConfigError(f"model.{name}", size, "must be at least 1", "Give a positive size")
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Raises MisuseError on what is no such image."""
        if not isinstance(images, Tensor) or images.ndim != _DIMENSIONS or images.shape[1] != 1:
            problem = (
                f"the CNN takes images of one channel, float32 (batch, 1, H, W), and the data gives {kinds_of(images)}"
            )
            raise MisuseError(f"{problem}: name a model for these data, one of your own by model._target_")
        logits: Tensor = self.layers(images)
        return logits
