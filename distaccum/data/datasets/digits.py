"""scikit-learn's handwritten digits: 1,797 real 8x8 images of ten classes."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset

from distaccum.config.checks import require_fraction
from distaccum.config.extras import install_command
from distaccum.data.datasets.text import IGNORED
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError


def digits(*, held_out: float) -> DataSpec:
    """Samples ``(image, label)``: fp32 of shape ``(1, 8, 8)`` in [0, 1], int64 scalar; the last part is held out.

    Args:
        held_out: Share of the samples to hold out.

    Raises:
        ConfigError: scikit-learn is not installed, or ``held_out`` is not between 0 and 1.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  an optional extra
    except ImportError as error:
        remedy = f"Run {install_command('digits')}"
        raise ConfigError("data", "digits", "scikit-learn is not installed", remedy) from error
    require_fraction("data.held_out", held_out)
    data = load_digits()
    images = torch.from_numpy((data.images / 16).astype(np.float32)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    cut = int(len(images) * (1 - held_out))
    return DataSpec(
        train=TensorDataset(images[:cut], labels[:cut]),
        eval_dataset=TensorDataset(images[cut:], labels[cut:]),
        description=f"handwritten digits: {cut:,} images to train on, {len(images) - cut:,} held out",
        ignored={1: IGNORED},
    )
