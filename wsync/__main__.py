"""``python -m wsync``."""

import sys

from wsync.cli import main

sys.exit(main())
