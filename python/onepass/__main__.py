"""`python -m onepass`, the same as the console script `onepass`."""

import sys

from onepass.cli import main

sys.exit(main())
