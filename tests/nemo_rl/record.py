"""Write the rows that NeMo RL's real code trains of each step: `make nemo-rl NEMO_RL=DIRECTORY ARGS=record`."""

from __future__ import annotations

import json

from tests.nemo_rl.trainer import train
from tests.support.nemo_rl_cases import RECORDED, STEPS


def main() -> None:
    steps = {
        name: {
            "main_trace": train(step, "grpo_codex", patched=False).rows(),
            "all_traces": train(step, "grpo_codex_all_traces", ranks=4).rows(),
        }
        for name, step in STEPS.items()
    }
    lines = (f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in steps.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
