"""The engines ``ddp`` and ``zero1``: every rank has the whole model; ``zero1`` shards the optimizer's state."""
