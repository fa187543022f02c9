"""Reinforcement learning over unmodified agent command-line harnesses.

`import polar_gym` registers the environments `polar/swe` and `polar/task` with gymnasium.
"""

from polar_gym.envs.registration import register_environments

__version__ = "0.1.0"

register_environments()
