"""`python -m fastclip` is `fastclip`; `torchrun -m fastclip` as well."""

import sys

from fastclip.cli import main

if __name__ == "__main__":
    sys.exit(main())
