"""Data of a training: the rows of each batch by seed and epoch, and where they are read."""
