"""The command: runs somebody's script, unchanged, within an audit."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from distaccum import program
from distaccum.errors import ConfigError, DistaccumError
from distaccum.losses.base import is_window_loss
from distaccum.tools.arguments import Arguments
from distaccum.tools.audit.report import Report
from distaccum.tools.audit.session import audit

_EPILOG = """\
examples:
  distaccum audit train.py
  torchrun --nproc-per-node=2 -m distaccum audit train.py --epochs 1 \\
      --loss my_losses:TokenLoss
  torchrun --nproc-per-node=2 -m distaccum audit train_hf.py
      (a model that returns its loss, as those of transformers do)

Options stand before the script, and whatever follows it is the script's; or
after it, among the script's own.
exit codes: 0 audited; 1 the gradient is not the global batch's, with --fail;
2 it could not be audited
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; ends with its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    program.start(given[:1])  # what stands behind the script is the script's
    sys.exit(_main(given))


def _main(arguments: list[str]) -> int:
    options, script, its_arguments = _parsed(arguments)
    shown: list[Report] = []
    try:
        if not Path(script).exists():
            raise ConfigError("script", script, "no such file", "Name the Python file whose gradient is to be compared")
        sys.path.insert(0, str(Path(script).resolve().parent))  # before the loss is imported, which may lie beside it
        loss = _loss(options.loss) if options.loss else None
        with audit(
            loss_sum=loss,
            count=None if loss is None else loss.count,
            windows=options.windows,
            tolerance=options.tolerance,
            accumulation_steps=options.accumulation_steps,
            on_enough=None if options.to_the_end else _stop,
        ) as report:
            shown.append(report)
            sys.argv = [script, *its_arguments]
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise
    except DistaccumError as error:
        print(f"distaccum audit: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return int(options.fail and not shown[0].right)


def _stop() -> None:
    """Ends the script, through its ``finally`` blocks."""
    raise SystemExit(0)


def _parsed(arguments: list[str]) -> tuple[argparse.Namespace, str, list[str]]:
    description = "Is a script's gradient its global batch's? Runs it for some optimizer steps."
    parser = Arguments("audit", description, _EPILOG)
    parser.add_argument(
        "--loss",
        metavar="MODULE:LOSS",
        help="an object, or a class made without arguments, that is called with (model, batch) and returns the summed "
        "loss, and whose count(batch) is the number of its items; without it: model(**batch).loss",
    )
    parser.add_argument("--windows", type=int, default=2, help="optimizer steps to audit (default: 2)")
    parser.add_argument(
        "--to-the-end",
        action="store_true",
        help="run the whole script, and audit its last window too, which may be short",
    )
    parser.add_argument("--accumulation-steps", type=int, help="as the script was told (default: of the first window)")
    parser.add_argument("--tolerance", type=float, help="of the relative error (default: 1e-4, in 16 bits 0.05)")
    parser.add_argument("--fail", action="store_true", help="exit with 1 where the gradient is wrong")
    parser.add_argument("script", help="a Python file")
    if arguments and arguments[0].startswith("-"):  # options first: whatever follows the script is the script's
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        options = parser.of(arguments)
        return options, options.script, options.arguments
    options, others = parser.parse_known_args(arguments)
    return options, options.script, others


def _loss(name: str) -> Any:
    module, _, attribute = name.partition(":")
    remedy = "Use --loss MODULE:LOSS, as in --loss distaccum:CrossEntropy"
    try:
        found = getattr(import_module(module), attribute)
        loss = found() if isinstance(found, type) else found
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError("--loss", name, f"{type(error).__name__}: {error}", remedy) from error
    if not callable(loss) or not callable(getattr(loss, "count", None)):
        raise ConfigError("--loss", name, "not callable with (model, batch), or without count(batch)", remedy)
    if is_window_loss(loss):
        problem = "compares the samples of a whole window, and the micro-batches of a loop are run again one by one"
        raise ConfigError("--loss", name, problem, "Audit the loop with another loss")
    return loss
