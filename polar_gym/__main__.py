"""The console script `polar-gym`; `python -m polar_gym` is `polar-gym rollout`."""

import sys


def main() -> None:
    """Run the command line. Where the user interrupts before a command runs, print one line."""
    try:
        from polar_gym.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    sys.argv.insert(1, "rollout")
    main()
