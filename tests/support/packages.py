"""Code for processes that import a package from a folder, whatever is installed."""

# An editable install is found before packages on the path.
FIND_BY_PATH = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
"""
