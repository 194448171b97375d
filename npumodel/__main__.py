"""`python -m npumodel`: the command line."""

import sys

from npumodel.cli import main

if __name__ == "__main__":
    sys.exit(main())
