"""Runs on this machine, without a rollout service: one run (`run`), and a sweep of runs (`sweep`).

`settings` refuses other settings where a run goes on, and `state` keeps the runs of an output apart.
"""
