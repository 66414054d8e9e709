"""python -m exvae.reproduce: see `exvae/reproduce/cells.py`."""

import sys

from exvae.reproduce.cells import main

sys.exit(main())
