"""`fastclip`, `python -m fastclip` and `torchrun -m fastclip`."""

import sys

from fastclip.distributed.stop_at_once import StopAtOnce, ignore_signals


def main() -> int:
    """Run the command line. From here to the end of the process, `fastclip train` answers signals."""
    if sys.argv[1:2] == ["train"]:
        StopAtOnce().start()
    try:
        from fastclip.cli import main as run_command  # after that: imports take a while

        return run_command()
    finally:
        ignore_signals()


if __name__ == "__main__":
    sys.exit(main())
