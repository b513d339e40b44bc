"""Which nodes travel as one task: a graph of integers, merged as long as its projected makespan gets shorter."""
