"""Data sources: one module for each file format or place. `exvae/data/registry.py` has the named data sets."""
