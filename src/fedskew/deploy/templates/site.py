"""The federation's ClientApp, the same for every site."""

from pathlib import Path

from fedskew.deploy import site_app

site = site_app(Path(__file__).parents[1])
