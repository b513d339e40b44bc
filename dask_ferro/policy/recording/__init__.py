"""Recorded events of a scheduling core: written as lines of text, and fed to a core again."""
