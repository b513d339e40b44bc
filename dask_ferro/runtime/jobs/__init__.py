"""One batch job: its configuration, its script, its logs, and what runs inside it."""
