"""The error that ends a comparison with one line and exit code 2."""


class BadInput(Exception):
    """An error that the user can correct: a file, a flag, a model function."""
