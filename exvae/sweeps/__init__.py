"""Grids of runs: `sweep` runs them on this machine, `slurm` on a cluster. Each point is a separate process."""
