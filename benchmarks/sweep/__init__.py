"""Methods, models and links, and what a step takes with each: the parts of ``benchmarks/network.py``."""
