"""The GPT in fp64, where runs that only round differently agree to the last digits whatever the processor."""

from typing import Any

from distaccum.models.gpt import GPT

MODEL = "model._target_=tests.support.wide.gpt"  # the entry point's setting; needs the root in PYTHONPATH
AGREES = 1e-12  # relative


def gpt(**settings: Any) -> GPT:
    """A GPT that is drawn in fp32, as the one it is compared with is, and trains in fp64."""
    return GPT(**settings).double()
