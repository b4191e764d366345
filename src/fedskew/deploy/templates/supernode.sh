#!/bin/sh
# At the site: join the federation. Keep it running, as a service that is restarted. If several sites share a
# machine, give each its own PORT.
cd "$$(dirname "$$0")" || exit
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec fedskew deploy supernode "$$PWD/data.toml" --port "$${PORT:-9094}"
