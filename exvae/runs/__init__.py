"""A run's folder: its files, checkpoints, records and figures, and the trained model that it holds (`trained`)."""
