"""The elastic controller: workers follow the work, and leave with nothing lost."""
