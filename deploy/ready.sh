#!/bin/bash
# Ends with status 0 if this container's process can serve a request now, and else prints the reason. It asks the
# port of the metrics, which never has TLS, and needs no other program, so that it costs milliseconds.
exec 3<>"/dev/tcp/127.0.0.1/$QUIRE_METRICS_PORT" || exit 1
printf 'GET /ready HTTP/1.0\r\n\r\n' >&3
read -r _ status _ <&3 && [ "$status" = 200 ] && exit
while read -r line; do reason=$line; done <&3
echo "$reason"
exit 1
