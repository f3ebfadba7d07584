"""``python -m longarc``: the command ``longarc``."""

import sys

from longarc.cli.main import main

if __name__ == "__main__":  # a process that multiprocessing starts imports this module again
    sys.exit(main())
