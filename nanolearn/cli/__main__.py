"""`python -m nanolearn.cli` is `nanolearn`, where no command was installed."""

import sys

from nanolearn.cli import main

if __name__ == "__main__":
    sys.exit(main())
