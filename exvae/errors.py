"""The exception for mistakes that the user can fix."""


class UserError(ValueError):
    """A mistake in a config, a file or a folder. `launch.py` prints it as one line and exits with code 2."""
