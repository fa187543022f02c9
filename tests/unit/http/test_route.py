"""The URLs of routes."""

from __future__ import annotations

from polar_gym.http import node_routes, server_routes


def test_a_part_of_a_path_is_quoted() -> None:
    base = "http://127.0.0.1:8700"
    assert server_routes.TASK.url(base, task_id="a/b ?ä") == f"{base}/v1/tasks/a%2Fb%20%3F%C3%A4"
    assert node_routes.DISPATCH.url(base, session_id="s", attempt=2) == f"{base}/v1/sessions/s/2"
    assert server_routes.TASKS.url(base) == f"{base}/v1/tasks"
