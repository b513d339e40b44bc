"""Threads of Dask's users about stealing, scaling and lost workers, each as one test.

It shows the symptom on stock Dask, and its absence here.
"""
