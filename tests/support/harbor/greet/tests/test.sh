#!/bin/sh
# The names come from a file beside this one, the first one from task.toml.
cd "$(dirname "$0")" || exit
reward=1
for name in "$NAME" $(cat names.txt); do
    [ "$(greet "$name")" = "Hello, $name!" ] || reward=0
done
echo "asked in $OLDPWD as $(id -u)"
echo $reward > /logs/verifier/reward.txt
