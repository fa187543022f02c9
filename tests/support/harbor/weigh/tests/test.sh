#!/bin/sh
[ "$(cat sum.txt)" = "42 $UNIT" ] && echo '{"score": 1.0}' > /logs/verifier/reward.json && exit
echo '{"score": 0}' > /logs/verifier/reward.json
