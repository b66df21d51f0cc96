"""What computes in which number format."""
