"""Checks of a model before it runs: each problem names what is wrong, where, what was got and wanted."""
