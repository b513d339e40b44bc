"""Tests of bundles on a cluster."""
