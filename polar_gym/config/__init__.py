"""Hydra configs -> checked records.

`conf/` holds the groups and their defaults, `recipes/` the ready-made runs; both ship in the wheel (`files`). Hydra
composes them (`composition`), pydantic checks the result (`checking`, `run_config`), and `loading` does both. Bad input
raises one `ConfigError` (`polar_gym.errors`) that names the key, its value and what is allowed, before anything starts.
Only `composition`, `loading` and `help` load Hydra or OmegaConf. The room uses the registry and the schema.
"""
