"""The federation's ServerApp."""

from pathlib import Path

from fedskew.deploy import server_app

server = server_app(Path(__file__).parents[1])
