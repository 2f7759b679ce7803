"""`python -m hiap`, for launchers that take a module."""

import sys

from hiap.cli.main import main

sys.exit(main())
