"""Formats of sources and sinks."""
