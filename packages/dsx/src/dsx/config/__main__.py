"""``python -m dsx.config``; see ``cli``."""

import sys

from .cli import main

sys.exit(main())
