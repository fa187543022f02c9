"""Traces -> files that trainers read.

`sft` turns the episodes that were worth it into a dataset of supervised examples: `acceptance` decides which, `rows`
says what one example is, `dataset` keeps the directory (in parts, so that a run that was killed half-way leaves a
usable one), `summary` counts.
"""
