"""``python -m cake_core.cli``: the ``cake`` command where the console script is not on PATH."""

import sys

from . import main

sys.exit(main())
