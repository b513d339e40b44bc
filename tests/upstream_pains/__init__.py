"""Threads of Dask's users about stealing, each as one test: the symptom on stock Dask, and its absence here."""
