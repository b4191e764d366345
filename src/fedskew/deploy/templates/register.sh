#!/bin/sh
# On the server, once, while superlink.sh runs: register the sites' keys. Nodes with other keys are refused.
cd "$$(dirname "$$0")" || exit
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
for site in $SITES; do
    flwr supernode register "../sites/$$site/key.pub" $CONNECTION --name "$$site" || exit
done
