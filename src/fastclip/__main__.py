"""`python -m fastclip` and `torchrun -m fastclip` run `fastclip`."""

import sys

from fastclip.cli import main

if __name__ == "__main__":
    sys.exit(main())
