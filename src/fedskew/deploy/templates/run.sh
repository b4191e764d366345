#!/bin/sh
# On the server, while superlink.sh runs: train. If it stops, run it again: it goes on after the last finished round.
cd "$$(dirname "$$0")" || exit
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flwr run ../app $CONNECTION --stream --run-config "out=\"$$PWD/runs\"$TARGET"
