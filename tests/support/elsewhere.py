"""Samples of a rank on another machine, which has another file system where the run directory is."""

import ctypes
import os
import subprocess

import torch

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


class Elsewhere:
    """64 small images; from rank ``first`` on, this process has mounts of its own, with an empty disk at ``folder``."""

    def __init__(self, folder: str, first: int = 2) -> None:
        if int(os.environ.get("RANK", "0")) >= first:
            if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
                raise OSError(ctypes.get_errno(), "unshare")
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)  # noqa: S607
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)  # noqa: S607

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1, 8, 8), index / 64), torch.tensor(index % 10)
