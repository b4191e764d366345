"""`python -m fedskew` is `fedskew`."""

from fedskew.cli import main

main()
