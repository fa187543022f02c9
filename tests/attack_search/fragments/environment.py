"""Fragments that change the environment, the working directory and the paths."""

from __future__ import annotations

from tests.attack_search.fragment import python

FRAGMENTS = (
    python(
        "environment_for_children",
        """
import os
os.environ.update(PYTHONOPTIMIZE="2", PYTEST_ADDOPTS="-p no:python --co", PYTHONSTARTUP="/workspace/setup.py",
                  PYTEST_PLUGINS="", PYTHONINSPECT="", PYTHONWARNINGS="ignore", PATH="/workspace/bin:/workspace")
""",
    ),
    python("directory_changed", "import os\nos.chdir('/tmp')\n"),
    python("path_emptied", "import sys\ndel sys.path[:]\nsys.path_importer_cache.clear()\n"),
    python("path_begins_here", "import os, sys\nsys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), 'vendor')]\n"),
    python(
        "locale_and_zone",
        """
import locale, os, time
os.environ["TZ"] = "Pacific/Kiritimati"
os.environ["LC_ALL"] = "tr_TR.UTF-8"
time.tzset()
""",
    ),
    python(
        "arguments_changed",
        """
import sys
sys.argv[:] = [sys.argv[0], "--version"]
sys.orig_argv[:] = [sys.executable, "-c", "pass"]
sys.flags = None
""",
    ),
    python(
        "warnings_are_silent_and_tests_too",
        """
import warnings, logging, unittest.signals
warnings.simplefilter("ignore")
warnings.showwarning = lambda *arguments, **named: None
logging.disable(logging.CRITICAL)
unittest.signals.installHandler()
""",
    ),
    python(
        "faulthandler_exits",
        """
import faulthandler, os
faulthandler.dump_traceback_later(0.05, exit=True)
faulthandler.cancel_dump_traceback_later()
faulthandler.register(10, chain=False)
""",
    ),
    python(
        "builtins_changed",
        """
import builtins
builtins.isinstance = (lambda old: lambda value, kind: True if kind is AssertionError else old(value, kind))(isinstance)
builtins.len = (lambda old: lambda value: old(value))(len)
builtins.AssertionError = type("AssertionError", (BaseException,), {})
""",
    ),
    python(
        "comparison_functions_changed",
        """
import builtins, difflib, operator, unittest.util
operator.eq = lambda one, other: True
unittest.util._count_diff_all_purpose = lambda *arguments: []
unittest.util.safe_repr = lambda value, short=False: ""
builtins.sorted = (lambda old: lambda *arguments, **named: old(*arguments, **named))(sorted)
""",
    ),
    python(
        "exit_functions_changed",
        """
import atexit, builtins, os, sys
_leave = os._exit
sys.exit = builtins.exit = builtins.quit = lambda status=0: _leave(0)
os._exit = lambda status=0: _leave(0)
atexit._run_exitfuncs = lambda: _leave(0)
""",
    ),
    python(
        "thread_runs_the_tests_again",
        """
import threading, unittest

def _decoy():
    class Decoy(unittest.TestCase):
        def test_it(self):
            pass
    unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromTestCase(Decoy))

_thread = threading.Thread(target=_decoy)
_thread.start()
_thread.join()
""",
    ),
)
