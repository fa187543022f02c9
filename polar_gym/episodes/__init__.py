"""Work with episodes after a rollout, and show episodes while it runs.

    reading      the episodes of a file, and the captured calls of an episode
    output       the file that a rollout writes its episodes to
    progress     a live line in the terminal: how many sessions are in which stage
    report       tables of a run, and a trace as text
    verify       the exact test of traces, and the comparison of logprobs with an engine
    pass_at_k    pass@k with confidence intervals
    ablation     the costs of each builder's traces for a trainer: run with `python -m polar_gym.episodes.ablation`

This room uses gateway, config, engines, builders and the modules at the root. The rooms cli, client and runs use it.
It has no plug-ins.
"""
