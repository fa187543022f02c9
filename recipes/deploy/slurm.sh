#!/bin/bash
# The rollout service on Slurm: the rollout server on the job's first machine, one node on every machine.
#
#   umask 077; openssl rand -hex 32 > ~/.polar-gym/service.key; openssl rand -hex 32 > ~/.polar-gym/node.key
#   sbatch --nodes=4 recipes/deploy/slurm.sh engine=vllm engine.url=http://inference:8000 pools.run=16
#   POLAR_GYM_SERVICE_KEY_FILE=~/.polar-gym/service.key polar-gym submit tasks.jsonl --server http://FIRST_MACHINE:8700
#
# Settings behind the script's name go to the nodes. STATE is on a disk that all machines share, so that a job that is
# started again goes on where the last job was killed. A node that dies is started again, and salvages its sessions. When
# Slurm pre-empts or ends the job, it signals the sandboxes as well as the nodes, so nodes interrupt their sessions at
# once (grace_seconds=0). A requeued job goes on with them from their record.
#SBATCH --job-name=polar-gym
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@60
set -euo pipefail

STATE=${STATE:-$HOME/.polar-gym/state}
export POLAR_GYM_SERVICE_KEY_FILE=${POLAR_GYM_SERVICE_KEY_FILE:-$HOME/.polar-gym/service.key}
export POLAR_GYM_NODE_KEY_FILE=${POLAR_GYM_NODE_KEY_FILE:-$HOME/.polar-gym/node.key}

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
server=http://$first:8700

again() { # repeat the command until it ends by itself: status 0 after a SIGTERM, 2 when a setting is wrong (75: try later)
  local code=0
  while true; do
    "$@" && return 0 || code=$?
    [ "$code" -eq 2 ] && return 2
    sleep 5
  done
}
export -f again

srun --nodes=1 --ntasks=1 --nodelist="$first" --overlap \
  bash -c 'again polar-gym serve cluster=none listen=0.0.0.0:8700 "state=$1"' serve "$STATE/server" &

# shellcheck disable=SC2016  # expanded on each machine
srun --overlap bash -c '
  again polar-gym gateway "server=$1" "state=$2/$(hostname -s)" "name=$(hostname -s)" \
    listen=0.0.0.0:8701 "url=http://$(hostname):8701" grace_seconds=0 "${@:3}"
' gateway "$server" "$STATE" "$@" &

trap 'kill -TERM $(jobs -p) 2>/dev/null' TERM
wait
