"""Flower's app for the server."""

from pathlib import Path

from fedskew.deploy import server_app

server = server_app(Path(__file__).parents[1])
