"""Test figures: the ELBO, the log-likelihood with its audit, and the Parzen window on pixels as a baseline."""
