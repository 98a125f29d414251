"""Predictions held against the measured cells of benchmarks/network.py."""
