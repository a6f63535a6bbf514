"""Entry point of `autopar` and of `python -m autopar`."""

from autopar.cli import main

if __name__ == "__main__":
    main()
