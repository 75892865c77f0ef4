"""`python -m outrider` is the command line."""

from outrider.cli.main import main

main()
