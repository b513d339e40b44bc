"""`ff.fit`: training as a loop over steps, on one process or by a plan, with checkpoints that it goes on from.

order, sources       the rows of each batch, by seed and epoch, and where they are read
scaling, update      one batch's gradients to parameters: loss scale, accumulation, clipping, the user's optimizer
program              loss, metrics and update as one graph, which `parallel` runs
manifest, checkpoint parameters, state and position in files
rates, patience      learning rates by step; when to stop
step, fit            the loop
"""
