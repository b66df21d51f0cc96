"""The image: its files, and what it does when it is built and run."""
