"""The package in figures: `python -m tests.house` prints the counts of each room, and holds them to their limits."""
