"""Task graphs to simulate: generated, recorded, or read from WfCommons' files."""
