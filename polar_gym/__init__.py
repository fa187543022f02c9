"""Reinforcement learning over unmodified agent command-line harnesses.

`import polar_gym` registers the environments `polar/swe` and `polar/task` with gymnasium.
"""

from gymnasium.envs import registration

__version__ = "0.1.0"

for _name, _class in {"swe": "Swe", "task": "Task"}.items():
    if f"polar/{_name}" not in registration.registry:
        registration.register(
            id=f"polar/{_name}",
            entry_point=f"polar_gym.envs.{_name}:{_class}Env",
            vector_entry_point=f"polar_gym.envs.{_name}:{_class}VectorEnv",
            nondeterministic=True,
        )
