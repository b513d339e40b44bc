"""The update of a batch: loss scale, accumulation, clipping, and the optimizer."""
