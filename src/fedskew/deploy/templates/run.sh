#!/bin/sh
# On the server, while superlink.sh runs: trains. Run it again after anything stopped it: it goes on at its round.
cd "$$(dirname "$$0")" || exit
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flwr run ../app $CONNECTION --stream --run-config "out=\"$$PWD/runs\"$TARGET"
