"""The error that ends a comparison with one line and exit code 2."""


class BadInput(Exception):
    """Something that the user can put right: a file, a flag, a model function."""
