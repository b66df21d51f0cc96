"""scikit-learn's handwritten digits: 1,797 real 8x8 images of ten classes."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset

from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError


def digits(*, held_out: float) -> DataSpec:
    """Samples ``(image, label)``: fp32 of shape ``(1, 8, 8)`` in [0, 1], int64 scalar; the last part is held out.

    Raises:
        ConfigError: if scikit-learn is not installed, or ``eval_dataset`` is not a share.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  an optional extra
    except ImportError as error:
        remedy = "Install the extra: pip install 'distaccum[digits]'"
        raise ConfigError("data", "digits", "scikit-learn is not installed", remedy) from error
    if not 0 < held_out < 1:
        raise ConfigError("data.held_out", held_out, "not between 0 and 1", "Give the share to hold out, such as 0.2")
    data = load_digits()
    images = torch.from_numpy((data.images / 16).astype(np.float32)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    cut = int(len(images) * (1 - held_out))
    return DataSpec(
        train=TensorDataset(images[:cut], labels[:cut]),
        eval_dataset=TensorDataset(images[cut:], labels[cut:]),
        description=f"handwritten digits: {cut:,} images to train on, {len(images) - cut:,} held out",
    )
