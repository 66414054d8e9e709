"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """A mistake in a config, a file or a folder. `launch.py` prints it as one line and exits with code 2."""
