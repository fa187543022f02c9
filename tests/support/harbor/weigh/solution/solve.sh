#!/bin/sh
[ "$TARE" = 3 ] || exit 1
sum=0
while read -r weight; do sum=$((sum + weight)); done < weights.txt
echo "$sum $UNIT" > sum.txt
