"""`python -m ranker COMMAND ...` is the same as `ranker COMMAND ...`."""

from ranker.cli.main import main

if __name__ == "__main__":
    main()
