"""FSDP2: parameters, gradients and optimizer state sharded over ranks."""
