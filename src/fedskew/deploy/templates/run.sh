#!/bin/sh
# On the server, while superlink.sh runs: train. If it stops, run it again: it goes on after the last finished round.
# Exit status: 0 trained, 1 stopped as the model was ruined, 2 refused or can't be written, 3 cut short, 4 rounds without
# a step, 130 Ctrl-C.
cd "$$(dirname "$$0")" || exit
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec fedskew deploy run ../app $CONNECTION --run-config "out=\"$$PWD/runs\"$TARGET$WEIGHTS"
