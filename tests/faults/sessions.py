"""A small harness that keeps the answers that it received, and tasks for it, to run while processes die."""

from __future__ import annotations

import random

from polar_gym.schema import EvaluatorSpec, HarnessSpec, Retries, RuntimeSpec, TaskRequest
from tests.faults.engine import ANSWER, RUN

RECEIVED = "received"
"""The file in the sandbox's /tmp with a line for each answer that the harness has read to its end."""

HARNESS = f"""
import json, os, sys, time, urllib.request, uuid
calls, pause, received = int(sys.argv[1]), float(sys.argv[2]), open("/tmp/{RECEIVED}", "a")
run = uuid.uuid4().hex
messages = [{{"role": "user", "content": "{RUN}" + sys.stdin.read()}}]
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
def text(event):
    return "".join(choice["delta"].get("content") or "" for choice in json.loads(event)["choices"])
for number in range(calls):
    body = json.dumps({{"model": "policy", "messages": messages, "stream": number % 2 == 1}}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        raw = response.read().decode()
    if number % 2:
        said = "".join(text(line[6:]) for line in raw.splitlines() if line.startswith("data: {{"))
    else:
        said = json.loads(raw)["choices"][0]["message"]["content"]
    print(run, said.removeprefix("{ANSWER}"), file=received, flush=True)
    print(run, said.removeprefix("{ANSWER}"), flush=True)
    messages += [{{"role": "assistant", "content": said}}, {{"role": "user", "content": "Go on."}}]
    time.sleep(pause)
"""

GRADING = "sleep 0.3"


def request(
    task_id: str, samples: int, callback_url: str, mark: str, dice: random.Random, runtime: RuntimeSpec, resume: bool
) -> TaskRequest:
    """Return a task. `mark` is in the command lines of all processes that the task starts."""
    command = ["python3", "-c", f"# {mark}\n{HARNESS}", str(dice.randint(2, 6)), f"{dice.uniform(0, 0.5):.3f}"]
    grading = {"name": "test_on_output", "command": f"{GRADING} # {mark}"}
    return TaskRequest(
        task_id=task_id,
        instruction=f"Task {task_id}.",
        num_samples=samples,
        timeout_seconds=300,
        runtime=runtime,
        agent=HarnessSpec.model_validate({"name": "command", "command": command}),
        evaluator=EvaluatorSpec.model_validate(grading),
        retries=Retries(node_death=50, failure=50, resume=resume),
        callback_url=callback_url,
    )
