"""Where images come from: one file for each format or place. `exvae/data/registry.py` gives them their names."""
