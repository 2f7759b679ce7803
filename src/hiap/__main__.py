"""`python -m hiap`, for launchers that take a module."""

import sys

from hiap.cli import main

sys.exit(main())
