"""The exceptions that `launch.py` prints as one line."""


class UserError(ValueError):
    """A mistake in a config, a file or a folder. `launch.py` prints it as one line and exits with code 2."""


class Diverged(Exception):
    """The loss or a gradient is NaN or infinite."""
