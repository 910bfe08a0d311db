import pytest

from onepass.tools.data import load_text


@pytest.fixture
def text(tmp_path):
    """A few thousand bytes to train on."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 40)
    return load_text([str(path)])
