"""As for attention."""

from tests.attention.conftest import executor, one_draw_first  # noqa: F401
