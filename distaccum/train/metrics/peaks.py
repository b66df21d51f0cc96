"""The most floating-point operations per second that a card makes, by its name and the format of the products.

Sources: NVIDIA's data sheets of A100, H100, H200, HGX B200, L4, L40S and A10, and for the GeForce cards the white
papers of the Ada and Ampere architectures (fp16 with fp32 sums). All without sparsity, with which many sheets state
twice as much. Of a card that is not here, or slower than its name says, ``metrics.peak_tflops`` states it.
"""

from __future__ import annotations

import re

# In TFLOP/s: 16 bits, tf32, fp32 outside of tensor cores (0: not known). The first pattern that fits a name counts.
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    (r"\bB200\b", (2250.0, 1125.0, 0.0)),
    (r"\bH[12]00 NVL\b", (835.0, 417.5, 60.0)),
    (r"\bH100 PCIe\b", (756.0, 378.0, 51.0)),
    (r"\bH[12]00\b", (989.0, 494.5, 67.0)),
    (r"\bA100\b", (312.0, 156.0, 19.5)),
    (r"\bL40S\b", (362.0, 183.0, 91.6)),
    (r"\bL4\b", (121.0, 60.0, 30.3)),
    (r"\bA10\b", (125.0, 62.5, 31.2)),
    (r"\bRTX 4090$", (165.2, 82.6, 82.6)),
    (r"\bRTX 3090$", (71.0, 35.6, 35.6)),
)
_COLUMNS = {"bf16": 0, "bf16-weights": 0, "fp16": 0, "tf32": 1, "fp32": 2}


def peak_flops(card: str, precision: str) -> float | None:
    """Operations per second of one card, by ``torch.cuda.get_device_name`` and the precision policy's name.

    None where the table does not have it.
    """
    for pattern, peaks in _PEAKS:
        if re.search(pattern, card):
            return peaks[_COLUMNS[precision]] * 1e12 or None
    return None
