"""`python -m quantkit`."""

from quantkit.cli.main import main

# Processes that multiprocessing spawns import this module too.
if __name__ == "__main__":
    main()
