"""The fixtures of the tests of attention."""

from tests.attention.conftest import executor, one_draw_first  # noqa: F401
