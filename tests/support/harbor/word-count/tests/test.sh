#!/bin/sh
# Two rewards: the number is right, and nothing else is in the file.
[ "$(pwd)" = /app ] || exit
right=0 alone=0
if [ -f count.txt ]; then
    [ "$(tr -cd 0-9 < count.txt)" = "$(wc -w < text.txt | tr -cd 0-9)" ] && right=1
    [ "$(tr -d '0-9\n ' < count.txt)" = "" ] && alone=1
fi
echo "{\"reward\": $((right * alone)), \"right\": $right, \"alone\": $alone}" > /logs/verifier/reward.json
