"""`python -m kvcourier` is the `kvcourier` command."""

from kvcourier.cli.app import main

if __name__ == "__main__":
    main()
