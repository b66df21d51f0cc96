"""What can go wrong, by name.

::

    DistaccumError
    ├── ConfigError       (ValueError)      the user can mend it: key, value, remedy; exit code 2
    ├── CheckpointError   (RuntimeError)    a checkpoint is damaged or does not belong to this run
    ├── DataError         (ValueError)      the data gives nothing to train on, or not what the plan was made for
    │   └── PeerError                       another rank could not load its part of a window: its error, in words
    ├── NonFiniteError    (ArithmeticError) a window's gradient is NaN or infinite on some rank
    ├── SpikeError        (ArithmeticError) gradients spike again and again
    ├── NoObjectiveError                    a sweep's run ended without the number that its sweeper is to be given
    ├── ResourceError     (RuntimeError)    memory is over
    ├── VerificationError (RuntimeError)    a run's proof of itself fails: its gradient, its loss, or ranks that differ
    └── MisuseError       (RuntimeError)    a loop does what would train wrongly: the message says what to write instead
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

ON_ALL_RANKS = {"on_all_ranks": True}
"""``extra`` of a warning that each rank gives in the same words: a command shows rank 0's."""


class DistaccumError(Exception):
    """Base of every error raised on purpose by distaccum."""


class ConfigError(DistaccumError, ValueError):
    """A setting that cannot work. The message names the key, the value, the problem and what to change."""

    def __init__(self, key: str, value: object, problem: str, remedy: str) -> None:
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        shown = key if value is None else f"{key}={value}"
        said = problem if problem.endswith("?") else f"{problem}."
        super().__init__(" ".join(f"{shown}: {said} {remedy}".split()))  # one line, whatever a library said


class CheckpointError(DistaccumError, RuntimeError):
    """A checkpoint that is damaged, incomplete, or was made by a run with another plan."""


class DataError(DistaccumError, ValueError):
    """Data that gives the loss nothing to learn from, or other samples or batches than a window is made of."""


GONE = "a rank is gone, or did not come within the process group's timeout; its own output says why"


class PeerError(DataError):
    """Raised where another rank could not do its part of a window; that rank raises its own error.

    ``reason`` is ``rank N: Type: message``, or that a rank is gone.
    """

    def __init__(self, reason: str, where: str) -> None:
        self.reason = reason
        super().__init__(f"{reason} ({where}; this rank stops with it)")


def expect_peers(error: BaseException | None) -> None:
    """Raises PeerError where another rank is gone: gloo is the only backend that says so at once."""
    if isinstance(error, RuntimeError) and "/gloo/" in str(error):
        raise PeerError(GONE, "while this one waited for it") from error


class NoObjectiveError(DistaccumError):
    """A run has ended without the number that a sweeper is to be given."""


class NonFiniteError(DistaccumError, ArithmeticError):
    """The reduced gradient of a window holds NaN or infinity."""


class SpikeError(DistaccumError, ArithmeticError):
    """Gradient norms spike in too many windows in a row, or after each rollback to the same checkpoint."""


class ResourceError(DistaccumError, RuntimeError):
    """Memory is over, of the host or of a device."""


class MisuseError(DistaccumError, RuntimeError):
    """A step, backward or micro-batch out of its order in a hand-written loop."""


class VerificationError(DistaccumError, RuntimeError):
    """The gradient is not the window's, the loss is not a sum over what it counts, or ranks hold other weights."""


class BatchStatisticsWarning(UserWarning):
    """The model computes something over a micro-batch, which no accumulation can make that of the global batch."""


class DataWarning(UserWarning):
    """A stream whose loading processes may each yield all of it."""


class UndividedLossWarning(UserWarning):
    """A window of a hand-written loop was stepped on, and nobody has read what its losses are to be divided by."""


class UntrainedParameterWarning(UserWarning):
    """A parameter that needs a gradient has got none in any window so far."""


class PrecisionWarning(UserWarning):
    """The hardware would be faster with another precision policy, or a setting of it had no effect."""


def near_misses(word: str, known: Iterable[str]) -> str:
    """``"; did you mean a or b?"`` for the known words closest to ``word``, or an empty string."""
    close = get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def shorten(names: Iterable[object], most: int = 4) -> str:
    """``"a, b and N more"``: the first ``most`` names, and how many are left."""
    every = list(map(str, names))
    left = len(every) - most
    return ", ".join(every[:most]) + (f" and {left} more" if left > 0 else "")


def kinds_of(value: Any) -> str:
    """What a sample or a batch holds, as ``(float32 (8, 4), int64 (8,))`` or ``{text: str, label: int}``."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {kinds_of(part)}' for name, part in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({shorten(map(kinds_of, value), 8)})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
