"""Contract tests of a user's own components, as `fedskew check my_method.py` runs them."""

from fedskew.checks._contract import check as check
from fedskew.checks._trial import FoundComponent as FoundComponent
