"""Run the `quantkit` command, also as `python -m quantkit`.

Signal handlers are set before the imports, which take long.
"""

from quantkit.leaving import handle, leave


def main() -> None:
    """Run the command line, as `quantkit.cli.main.main` does."""
    handle(leave)
    from quantkit.cli import main as command

    command.main()


# Processes that multiprocessing spawns import this module too.
if __name__ == "__main__":
    main()
