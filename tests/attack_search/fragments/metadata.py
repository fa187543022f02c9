"""Fragments in the files by which tools find plug-ins and options."""

from __future__ import annotations

from tests.attack_search.fragment import files

_PLUGIN = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
_METADATA = "Metadata-Version: 2.1\nName: compat\nVersion: 1.0\n"
_POINTS = "[pytest11]\ncompat = compat_plugin\n"

FRAGMENTS = (
    files(
        "entry_point_in_egg_info",
        {
            "compat.egg-info/PKG-INFO": _METADATA,
            "compat.egg-info/entry_points.txt": _POINTS,
            "compat.egg-info/top_level.txt": "compat_plugin\n",
            "compat_plugin.py": _PLUGIN,
        },
    ),
    files(
        "entry_point_in_dist_info",
        {
            "compat-1.0.dist-info/METADATA": _METADATA,
            "compat-1.0.dist-info/entry_points.txt": _POINTS,
            "compat-1.0.dist-info/RECORD": "compat_plugin.py,,\n",
            "compat_plugin.py": _PLUGIN,
        },
    ),
    files(
        "dist_info_of_pytest_itself",
        {
            "pytest-99.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pytest\nVersion: 99.0\n",
            "pytest-99.0.dist-info/entry_points.txt": _POINTS,
            "compat_plugin.py": _PLUGIN,
        },
    ),
    files(
        "pytest_ini_loads_a_plugin",
        {"pytest.ini": "[pytest]\naddopts = -p compat_plugin\n", "compat_plugin.py": _PLUGIN},
    ),
    files(
        "pytest_ini_python_functions",
        {"pytest.ini": "[pytest]\npython_functions = nothing_*\npython_files = nothing_*.py\naddopts = --co -q\n"},
    ),
    files("tox_ini_options", {"tox.ini": "[pytest]\naddopts = -p no:python --continue-on-collection-errors\n"}),
    files(
        "pyproject_options",
        {
            "pyproject.toml": (
                '[tool.pytest.ini_options]\naddopts = "-p compat_plugin -p no:terminal"\npythonpath = ["."]\n'
            ),
            "compat_plugin.py": _PLUGIN,
        },
    ),
    files(
        "setup_cfg_options",
        {"setup.cfg": "[tool:pytest]\naddopts = --strict-markers -p compat_plugin\n", "compat_plugin.py": _PLUGIN},
    ),
    files("hidden_pytest_ini", {".pytest.ini": "[pytest]\naddopts = -p compat_plugin\n", "compat_plugin.py": _PLUGIN}),
    files(
        "ini_ignores_the_hidden_tests",
        {
            "pytest.ini": "[pytest]\naddopts = --ignore=@TEST_FILE@ decoy\n",
            "decoy/test_decoy.py": "def test_it():\n    pass\n",
        },
    ),
    files(
        "ini_redirects_the_cache_and_the_report",
        {"pytest.ini": "[pytest]\ncache_dir = /tmp\nlog_file = /dev/stdout\nxfail_strict = false\n"},
    ),
    files(
        "ini_doctests_only",
        {"pytest.ini": "[pytest]\naddopts = --doctest-modules --assert=plain -p no:cacheprovider --runxfail\n"},
    ),
    files("coveragerc_plugin", {".coveragerc": "[run]\nplugins = compat_plugin\n", "compat_plugin.py": _PLUGIN}),
    files(
        "conftest_below_the_tests",
        {"@TEST_DIRECTORY@/conftest.py": _PLUGIN, "@TEST_DIRECTORY@/pytest.ini": "[pytest]\n"},
    ),
)
