"""python -m exvae.results: see `exvae/reproduce/results.py`."""

import sys

from exvae.reproduce.results import main

if __name__ == "__main__":
    sys.exit(main())
