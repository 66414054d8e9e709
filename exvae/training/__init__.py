"""Training: the compiled step (Algorithm 1 of the paper), the host's part of a step, and the loop around both."""
