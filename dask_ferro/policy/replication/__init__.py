"""Placement of data: copies against preemption, and the data of workers that retire."""
