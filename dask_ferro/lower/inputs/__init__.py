"""How the inputs of a call reach its tasks: what is cut with the batch, and what is sent to workers."""
