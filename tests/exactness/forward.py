"""Scores trained tokens with a forward pass of the model in transformers: a script for an interpreter that has torch.

    PYTHON forward.py MODEL <SEQUENCES >SCORES

A line of the input is `{"ids": [...], "places": [...]}`, a line of the output the list of the model's logprobs
(temperature 1, float32) of the ids at these places.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main() -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor([asked["ids"]])
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[0]
            places = torch.tensor(asked["places"])
            likely = torch.log_softmax(model.lm_head(hidden[places - 1]).float(), dim=-1)
        scores = likely.gather(1, ids[0][places].unsqueeze(1)).squeeze(1)
        print(json.dumps(scores.tolist()), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
