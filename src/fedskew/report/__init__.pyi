from ._page import write_report as write_report
from ._ranking import paired_differences as paired_differences
from ._runs import SeedRun as SeedRun
from ._runs import label_shares as label_shares
from ._sites import ClientTable as ClientTable
from ._sites import SiteActivity as SiteActivity
