"""As for attention."""

from tests.attention.conftest import executor  # noqa: F401
