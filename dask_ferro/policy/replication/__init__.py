"""Where results go: copies before a preemption, and the data of workers that leave."""
