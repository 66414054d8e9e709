"""python -m exvae.tables: see `exvae/reproduce/tables.py`."""

import sys

from exvae.reproduce.tables import main

if __name__ == "__main__":
    sys.exit(main())
