"""`ff.fit`: training as a loop over steps, in one process or by a plan, with checkpoints that it goes on from.

batches, order   the rows of each batch, by seed and epoch, and where they are read
update           the update of a batch: loss scale, accumulation, clipping, the user's optimizer
graphs           loss and metrics as tensors
program          they and the update as one pipeline, whose calls are the steps
state            what decides the next bit;  checkpoint: the state in files
rates            learning rates by step
training, fit    the loop
"""
