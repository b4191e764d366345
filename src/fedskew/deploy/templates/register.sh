#!/bin/sh
# On the server, once, while superlink.sh runs: from now on only these keys may join, each under its site's name.
cd "$$(dirname "$$0")" || exit
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
for site in $SITES; do
    flwr supernode register "../sites/$$site/key.pub" $CONNECTION --name "$$site" || exit
done
