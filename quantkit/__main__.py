"""`python -m quantkit`."""

from quantkit.cli.main import main

main()
