"""`python -m esm_turbo`, the same as `esm-turbo`."""

from esm_turbo.cli.app import main

if __name__ == "__main__":
    main()
