"""Recordings of a scheduling core's events, as lines of text, and their replay."""
