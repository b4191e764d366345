"""`python -m fedskew` is `fedskew`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is imported ends it with a word, too."""
    try:
        from fedskew import cli

        cli.main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
