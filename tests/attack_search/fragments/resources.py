"""Fragments that take away what the runner needs, or wait it out."""

from __future__ import annotations

from tests.attack_search.fragment import python, shell

FRAGMENTS = (
    python("files_limited", "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))\n"),
    python(
        "file_size_limited",
        """
import resource, signal
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
""",
    ),
    python("processor_time_limited", "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"),
    python("processes_limited", "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"),
    python("recursion_limited", "import sys\nsys.setrecursionlimit(40)\n"),
    python("memory_limited", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 27, 1 << 27))\n"),
    python(
        "disk_filled",
        """
import os
try:
    with open("/tmp/filler", "wb") as _file:
        for _ in range(64):
            _file.write(b"x" * (1 << 20))
except OSError:
    pass
""",
    ),
    python("sleeps_until_the_limit", "import time\ntime.sleep(60)\n"),
    python(
        "thread_never_ends",
        "import threading, time\nthreading.Thread(target=lambda: time.sleep(40)).start()\n",
    ),
    python(
        "output_flooded",
        "import os\nfor _ in range(600):\n    os.write(1, b'ok\\n' * 10000)\n",
    ),
    python(
        "descriptors_closed",
        "import os\nos.closerange(3, 256)\n",
    ),
    python(
        "output_closed",
        "import os\nfor _each in (1, 2):\n    os.dup2(os.open('/dev/null', os.O_WRONLY), _each)\n",
    ),
    python(
        "stack_overflow_in_c",
        "import faulthandler, ctypes\nfaulthandler.disable()\nctypes.string_at(0)\n",
    ),
    python("collector_disabled", "import gc\ngc.disable()\ngc.freeze()\n"),
    python("time_stops", "import time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0\n"),
    shell("many_files", "mkdir many; cd many && seq 1 2000 | xargs touch"),
    shell("deep_directories", "d=.; for i in $(seq 1 60); do d=$d/deep; done; mkdir -p $d && echo x > $d/x.py"),
    shell("large_file", "head -c 8000000 /dev/urandom > large.bin"),
)
