"""`python -m bough` is the `bough` command."""

import sys

from bough.cli.main import main

sys.exit(main())
