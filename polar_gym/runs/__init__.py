"""Runs on this machine, without a rollout service: one run (`run`), and a sweep of runs (`sweep`)."""
