"""The image that the Dockerfiles of Harbor tasks in the tests begin with: a busybox, made without a registry."""

import contextlib
from collections.abc import Iterator

import docker

from tests.lifecycle.images import BUSYBOX_FILES, imported
from tests.support.harbor_tasks import BASE


@contextlib.contextmanager
def base_image(host: str) -> Iterator[None]:
    """Have the daemon know the image while the body runs, and the images that were built from it no longer."""
    changes = ["ENV PATH=/usr/local/bin:/usr/bin:/bin"]
    with (
        imported(host, {**BUSYBOX_FILES, "root/.keep": ""}, changes=changes) as image,
        contextlib.closing(docker.DockerClient(base_url=host)) as client,
    ):
        client.images.get(image).tag(BASE)
        try:
            yield
        finally:
            for built in client.images.list(name="polar-gym/built"):
                client.images.remove(str(built.id), force=True)
            client.images.remove(BASE, force=True)
