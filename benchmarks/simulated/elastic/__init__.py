"""Elasticity on a virtual batch system."""
