"""Tests with NeMo RL's real code on the CPU: `make nemo-rl NEMO_RL=DIRECTORY`, with a checkout of commit 7ea279a."""
