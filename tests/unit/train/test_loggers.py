from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from distaccum.distributed.world import World
from distaccum.train.metrics.console import ConsoleLogger, Status, open_console
from distaccum.train.metrics.loggers import JsonlLogger, rewind_jsonl
from tests.support.terminal import on_terminal

WORLD = World(rank=0, size=1, device=torch.device("cpu"))
RECORD = {
    "step": 3,
    "loss": 0.1 + 0.2,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "samples": 24,
    "tokens": 240,
    "tokens_per_s": 5.0,
    "eval_bits_per_byte": 2.25,
    "loss_scale": 1.0,
    "applied": True,
    "skipped": 0,
}


def test_numbers_are_written_unrounded_and_appended(tmp_path: Path) -> None:
    for _ in range(2):
        logger = JsonlLogger(tmp_path / "metrics.jsonl")
        logger.log(RECORD)
        logger.close(failed=False)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [RECORD, RECORD]


def test_a_record_is_in_the_file_before_the_next_update(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(RECORD)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == RECORD
    logger.close(failed=False)


def test_a_resumed_run_takes_back_what_it_will_repeat_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"window": {window}}}\n' for window in range(1, 6)) + '{"window": 6, "lo')
    rewind_jsonl(path, 3)
    assert path.read_text() == '{"window": 1}\n{"window": 2}\n{"window": 3}\n'
    assert (tmp_path / "metrics.superseded.jsonl").read_text() == '{"window": 4}\n{"window": 5}\n{"window": 6, "lo\n'
    rewind_jsonl(path, 3)
    rewind_jsonl(tmp_path / "none.jsonl", 3)
    assert len((tmp_path / "metrics.superseded.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("damage", [b'{"window": 2, "x": "\xff"}', b'{"window": 2, "lo', b"\x00\x00", b"[2]", b""])
@pytest.mark.fault(
    "a damaged byte (one that is no UTF-8 too) or a torn line in `metrics.jsonl`",
    group="directory",
    does="moves the line as it is to `metrics.superseded.jsonl`, and resumes",
    says="metrics.jsonl: line 2 is damaged",
)
def test_a_damaged_line_is_set_aside_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes, says: Callable[[str], None]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"window": 1}\n' + damage + b'\n{"window": 3}\n')
    rewind_jsonl(path, 3)
    assert path.read_text() == '{"window": 1}\n{"window": 3}\n'
    assert (tmp_path / "metrics.superseded.jsonl").read_bytes() == damage + b"\n"
    says(caplog.text)


def _console(console: Console) -> ConsoleLogger:
    return ConsoleLogger(10, console, Status(10, WORLD))


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    logger = _console(Console(file=out, force_terminal=False))
    logger.log(RECORD)
    logger.close(failed=False)
    assert out.getvalue().startswith("step      3/10  loss 0.3000  grad norm 1.000  lr 1.00e-03")
    assert out.getvalue().endswith("held-out:  bits per byte 2.2500\n")


@pytest.mark.parametrize(("counted", "unit"), [(240, "tokens"), (24, "samples")])
def test_a_record_is_in_tokens_where_the_loss_counts_them_and_in_samples_elsewhere(counted: int, unit: str) -> None:
    out = io.StringIO()
    _console(Console(file=out, width=300)).log(RECORD | {"tokens": counted})
    assert f"  5 {unit}/s  " in out.getvalue()


def test_a_live_line_on_a_terminal() -> None:
    out = io.StringIO()
    logger = _console(Console(file=out, force_terminal=True, width=150))
    logger.log(RECORD)
    logger.close(failed=False)
    assert "3/10" in out.getvalue()
    assert "loss 0.3000" in out.getvalue()


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_on_a_terminal_are_whole_at_its_width(columns: int) -> None:
    long = {f"eval_{name}": 1.0 for name in ("loss", "accuracy", "words_per_line", "recall_at_ten", "perplexity")}
    skipped = RECORD | {"applied": False, "skipped": 3, "loss_scale": 65536.0, "underflow_share": 0.5, "mfu": 0.4}
    words = {}
    for terminal in (True, False):
        out = io.StringIO()
        logger = _console(Console(file=out, force_terminal=terminal, width=columns, no_color=True))
        logger.log(RECORD | long)
        logger.log(skipped)
        logger.alert("the loss scale has collapsed", "it has fallen to its minimum " + "and [so] on " * 20)
        logger.close(failed=False)
        words[terminal] = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert all(len(line) <= columns for line in words[True].splitlines())
    assert "\nstep      3/10  held-out:  bits per byte 2.2500  loss 1.0000" in words[True]
    assert len(words[False].splitlines()) == 3
    again = words[True].replace("\nstep      3/10  held-out:", "  held-out:").split()
    assert again == words[False].split()  # every word in one piece, and none is lost


def test_a_checkpoint_is_told_on_a_terminal_alone() -> None:
    for terminal, expected in ((True, "step      4/10  saved: /a/b\n"), (False, "")):
        out = io.StringIO()
        _console(Console(file=out, force_terminal=terminal, width=80)).saved(4, Path("/a/b"))
        assert out.getvalue() == expected


def test_a_path_is_in_one_piece_also_where_it_is_wider_than_the_terminal() -> None:
    out, path = io.StringIO(), "/" + "x" * 100
    _console(Console(file=out, force_terminal=True, width=80)).saved(4, Path(path))
    assert out.getvalue().splitlines() == ["step      4/10  saved:", f"  {path}"]


def test_where_there_is_no_terminal_there_are_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    logger = _console(open_console())
    print("printed", end="\r")
    logger.enter("evaluating after step 3")
    logger.log(RECORD)
    logger.close(failed=False)
    said = capsys.readouterr().out
    assert said.startswith("printed\rstep      3/10  loss 0.3000")
    assert "\x1b" not in said


def test_on_a_terminal_the_live_line_follows_the_run_and_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    with on_terminal(80) as screen:
        logger = _console(open_console())
        logger.log(RECORD)
        logger.enter("saving step 3")
        rows = screen.rows
        assert rows[-1].startswith("step 0/10  saving step 3  loss 0.3000")
        assert rows[0].startswith("step      3/10  loss 0.3000")
        logger.close(failed=False)
        assert screen.rows == rows[:-1]


def test_a_line_says_what_became_of_the_loss_scale() -> None:
    out = io.StringIO()
    logger = _console(Console(file=out, width=300))
    logger.log(RECORD | {"loss_scale": 65536.0, "underflow_share": 0.0123, "skipped": 2, "applied": False})
    assert "loss scale 65536  underflow 1.23%  skipped 2  SKIPPED: the gradient is NaN or infinite" in out.getvalue()


def test_a_line_tells_a_spike_from_a_gradient_that_is_not_finite() -> None:
    out = io.StringIO()
    logger = _console(Console(file=out, width=300))
    for norm in (40.0, math.nan):
        logger.log(RECORD | {"grad_norm": norm, "spikes": 1, "skipped": 1, "applied": False})
    first, second = out.getvalue().splitlines()
    assert "SKIPPED: the gradient norm spikes" in first
    assert "SKIPPED: the gradient is NaN or infinite" in second
