"""Evaluation: the ELBO, the log-likelihood with its audit, and a Parzen window on pixels as a baseline."""
