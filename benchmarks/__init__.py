"""Benchmarks: ``python -m benchmarks --help``. One benchmark a file; results lie in ``results/``."""
