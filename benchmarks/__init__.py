"""Measurements of speed. Each module is a command."""

import sys

from exvae import huge_pages

if any(word.startswith("benchmarks.") for word in sys.orig_argv):  # a benchmark is the program, as with launch.py
    huge_pages.use()
