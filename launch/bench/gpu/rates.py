"""What a run makes of a card: tokens per second, TFLOP/s, and MFU by distaccum's own metrics."""

from __future__ import annotations

import torch
from torch import nn

from distaccum.config.instantiate import build
from distaccum.config.schema import RunConfig
from distaccum.tools.flops import count_flops, peak_flops
from distaccum.train.metrics.meter import Utilization
from launch.bench.gpu.figures import Figure, Options
from launch.bench.gpu.runs import tokens_of_window


def flops_per_token(config: RunConfig) -> float:
    """Operations of a token, forward and backward, counted on a model without memory."""
    length = int(config.data["seq_len"])
    with torch.device("meta"):
        model: nn.Module = build("model", config.model)
    row = torch.zeros(1, length, dtype=torch.int64)
    return count_flops(model, build("loss", config.loss), (row, row)) / length


def peak_of_card(device: torch.device, precision: str) -> float | None:
    """Operations per second that the card makes at most; None where nobody knows."""
    return peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def rate(
    options: Options,
    of: str,
    config: RunConfig,
    window_s: float,
    *,
    least: float | None = None,
    peak: float | None = None,
) -> list[Figure]:
    """Tokens per second, TFLOP/s and (where the card's peak is known, or given) MFU of a run.

    Args:
        options: of the measurement.
        of: the case.
        config: of the run.
        window_s: seconds of one window.
        least: the target, in tokens per second.
        peak: of the card, in operations per second; None: by its name.
    """
    tokens_per_s = tokens_of_window(config) / window_s
    peak = peak or peak_of_card(options.device, config.precision.name)
    found = Utilization(flops_per_token(config), peak=peak, ranks=1).metrics(tokens_per_s)
    target = "" if least is None else f"at least {least:,.0f}"
    holds = None if least is None or options.small else tokens_per_s >= least
    figures = [
        Figure(of=of, name="tokens per second", value=tokens_per_s, unit="tokens/s", target=target, holds=holds),
        Figure(of=of, name="operations", value=found["tflops_per_rank"], unit="TFLOP/s"),
    ]
    if "mfu" in found:
        figures.append(Figure(of=of, name="MFU", value=100 * found["mfu"], unit="%"))
    return figures
