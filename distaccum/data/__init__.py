"""From indices to windows of micro-batches, and the sources that the configuration can name."""
