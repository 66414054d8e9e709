"""Training: Algorithm 1 of the paper (`step`), what it changes, the host's part of a step, and the loop around it."""
