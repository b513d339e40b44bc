"""Task graphs to simulate: recorded, read from WfCommons' files, or cut into bundles."""
