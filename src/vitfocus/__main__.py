"""`python -m vitfocus` is the command line."""

import sys

from vitfocus.cli import main

if __name__ == "__main__":
    sys.exit(main())
