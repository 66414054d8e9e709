"""python -m exvae.trials: see `exvae/reproduce/trials.py`."""

import sys

from exvae.reproduce.trials import main

if __name__ == "__main__":
    sys.exit(main())
