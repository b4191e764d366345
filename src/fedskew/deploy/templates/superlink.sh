#!/bin/sh
# On the server: the process that sites connect to. Keep it running; after a restart it still knows its sites.
cd "$$(dirname "$$0")" || exit
export FLWR_HOME="$$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
mkdir -p flower && cat > flower/config.toml <<END || exit
[superlink]
default = "$CONNECTION"
[superlink.$CONNECTION]
address = "$LOCAL"
root-certificates = "$$PWD/ca.crt"
END
exec fedskew deploy superlink --host "$LISTEN" --port $PORT --enable-supernode-auth --database state.db \
    --max-reply $MAX_REPLY \
    --ssl-certfile server.crt --ssl-keyfile server.key --ssl-ca-certfile ca.crt --disable-runtime-dependency-installation
