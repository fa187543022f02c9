"""From a task to a request and to the demonstration that the scripted policy plays."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.evaluators import EVALUATORS
from polar_gym.evaluators.swe import SweOptions
from polar_gym.evaluators.twins import weak_tests
from polar_gym.gateway.node.assemble import make_request
from polar_gym.schema import Budget, EvaluatorSpec, RuntimeSpec, Sampling, TaskRequest
from polar_gym.tasks import Task
from polar_gym.tasks.bundled import TASKS
from polar_gym.tasks.request import instruction, reference_script, reference_scripts
from tests.support import task_files
from tests.support.shell import heredoc

BUNDLED = TASKS(TASKS.Options()).load()


def request_for(task: Task, evaluator: EvaluatorSpec, runtime: RuntimeSpec | None = None) -> TaskRequest:
    return task_files.request_for(
        task,
        runtime=runtime or RuntimeSpec(name="bubblewrap"),
        evaluator=evaluator,
        num_samples=2,
        sampling=Sampling(temperature=0.5),
        budget=Budget(max_calls=10),
    )


def test_swe_evaluator_is_filled_from_the_task():
    task = BUNDLED[0]
    request = request_for(task, EvaluatorSpec(name="swe", timeout_seconds=30))
    options = SweOptions.model_validate(request.evaluator.options)
    assert options.FAIL_TO_PASS == task.FAIL_TO_PASS
    assert options.PASS_TO_PASS == task.PASS_TO_PASS
    assert options.test_patch == task.test_patch
    assert request.evaluator.timeout_seconds == 30
    assert request.runtime.workspace.source == task.workspace
    assert TaskRequest.from_json(request.to_json()) == request


def test_request_keeps_the_name_of_the_task_in_its_data():
    """`polar-gym submit --prefix` changes the task id; an export that splits by task once split such a task."""
    task = BUNDLED[0]
    request = request_for(task, EvaluatorSpec(name="swe")).model_copy(update={"task_id": "run1-" + task.instance_id})
    assert request.metadata == {"repo": task.repo, "base_commit": task.base_commit, "instance_id": task.instance_id}


def test_options_of_the_evaluator_win_over_the_task():
    evaluator = EvaluatorSpec.model_validate({"name": "swe", "test_command": "make test"})
    assert request_for(BUNDLED[0], evaluator).evaluator.options["test_command"] == "make test"


def test_a_command_evaluator_without_a_command_runs_the_tasks_own():
    task = BUNDLED[0]
    own = request_for(task, EvaluatorSpec(name="test_on_output")).evaluator.options
    assert own["command"] == task.test_command
    given = EvaluatorSpec.model_validate({"name": "test_on_output", "command": "true"})
    assert request_for(task, given).evaluator.options["command"] == "true"


def test_a_command_evaluator_needs_a_command_from_somewhere():
    config = load_config(None, ["evaluator=test_on_output"])
    task = BUNDLED[0].model_copy(update={"test_command": ""})
    with pytest.raises(ConfigError, match=r"evaluator\.command"):
        make_request(config, task)


def test_parts_of_a_composite_are_filled_from_the_task_too():
    components = {"tests": {"name": "swe"}, "done": {"name": "session_completion"}}
    evaluator = EvaluatorSpec.model_validate({"name": "composite", "components": components})
    request = request_for(BUNDLED[0], evaluator)
    filled = EVALUATORS.options(request.evaluator).components
    assert filled["tests"].options["FAIL_TO_PASS"] == BUNDLED[0].FAIL_TO_PASS
    assert filled["done"].options == {}
    assert TaskRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize(
    ("components", "told"),
    [
        ("{a: swe}", "evaluator.components.a='swe'"),
        ("{a: {}}", "evaluator.components.a={}"),
        ("{a: null}", "evaluator.components.a=None"),
        ("{a: {name: 5}}", "evaluator.components.a={'name': 5}"),
        (
            "{a: {name: composite, components: {b: {weight: 1}}}}",
            "evaluator.components.a.components.b={'weight': 1}",
        ),
    ],
)
def test_a_part_of_a_composite_that_names_no_evaluator_is_named(components: str, told: str):
    config = load_config(None, ["evaluator=composite", f"evaluator.components={components}"])
    with pytest.raises(ConfigError) as raised:
        make_request(config, BUNDLED[0])
    expected = "expected an evaluator's name and its options, e.g. {name: swe}"
    assert str(raised.value) == f"task {BUNDLED[0].instance_id}: {told}: {expected}"


def test_other_evaluators_see_no_hidden_tests():
    assert request_for(BUNDLED[0], EvaluatorSpec(name="session_completion")).evaluator.options == {}


def test_image_and_packages_come_from_the_task():
    task = Task(instance_id="a", problem_statement="b", image="image:1", python_requirements=["x==1"])
    request = request_for(task, EvaluatorSpec(name="session_completion"), RuntimeSpec(name="docker", image="image:0"))
    assert request.runtime.image == "image:1"
    assert request.runtime.workspace.python_requirements == ["x==1"]
    assert request.runtime.workspace.source is None


def test_the_agent_is_told_neither_solution_nor_hidden_tests():
    for task in BUNDLED:
        text = instruction(task)
        assert task.instance_id not in text
        assert not [test for test in task.FAIL_TO_PASS if test.rpartition(".")[2] in text]
        assert not [line for line in task.patch.splitlines() if line.startswith("+ ") and line[1:].strip() in text]


def test_no_bundled_test_can_be_forged_by_a_guess():
    for task in BUNDLED:
        assert weak_tests(task.twins, task.FAIL_TO_PASS) == []


def test_each_script_matches_its_own_task_only():
    for task in BUNDLED:
        match = reference_script(task)["match"]
        assert [other.instance_id for other in BUNDLED if match in instruction(other)] == [task.instance_id]


def test_issues_that_begin_with_the_same_line_have_scripts_of_their_own():
    """Guards against a sound task that fails with the solution of another one."""
    tasks = [
        task.model_copy(update={"problem_statement": f"Bug report\n\n{task.problem_statement}"}) for task in BUNDLED[:3]
    ]
    for task, script in zip(tasks, reference_scripts(tasks), strict=True):
        assert [other.instance_id for other in tasks if script["match"] in instruction(other)] == [task.instance_id]


@pytest.mark.parametrize(
    "text", ["", "AEND", "AEND\nA\x80\nB\x80", "P\x80", "$(exit 1) `x` \\ 'q' \"d\"\n", "no newline", "\n\n"]
)
def test_heredoc_keeps_hostile_text(text):
    _feeds_exactly(text)


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_heredoc_keeps_any_text(text):
    _feeds_exactly(text)


def _feeds_exactly(text: str) -> None:
    shown = subprocess.run(["sh", "-c", f"cat {heredoc(text)}"], capture_output=True, check=True).stdout
    assert shown == (text if text.endswith("\n") else text + "\n").encode()
