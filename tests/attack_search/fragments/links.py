"""Fragments of links, pipes, devices and modes."""

from __future__ import annotations

from tests.attack_search.fragment import shell

_DECOY = """
mkdir -p decoy
printf 'import unittest\\n\\nclass T(unittest.TestCase):\\n    def test_it(self): pass\\n' > decoy/test_decoy.py
"""

FRAGMENTS = (
    shell("tests_linked_to_a_decoy", _DECOY + "rm -rf '@TEST_DIRECTORY@' && ln -s decoy '@TEST_DIRECTORY@'"),
    shell("tests_linked_outside", "rm -rf '@TEST_DIRECTORY@' && ln -s /tmp '@TEST_DIRECTORY@'"),
    shell("test_file_linked_to_nothing", "rm -f '@TEST_FILE@'; ln -s /dev/null '@TEST_FILE@'"),
    shell("test_file_linked_to_a_decoy", _DECOY + "rm -f '@TEST_FILE@'; ln -s ../decoy/test_decoy.py '@TEST_FILE@'"),
    shell("test_file_is_a_directory", "rm -f '@TEST_FILE@'; mkdir -p '@TEST_FILE@'; echo > '@TEST_FILE@/__init__.py'"),
    shell(
        "tests_directory_is_a_file", "rm -rf '@TEST_DIRECTORY@'; echo 'import sys; sys.exit(0)' > '@TEST_DIRECTORY@'"
    ),
    shell("loop_of_links", "ln -s . loop; ln -s ../.. '@TEST_DIRECTORY@/up'; ln -s self self"),
    shell("link_to_the_root", "ln -s / everything; ln -s /proc/self/fd fds; ln -s /proc/self/cwd cwd"),
    shell("pipe_in_the_place_of_a_test", "rm -f '@TEST_FILE@'; mkfifo '@TEST_FILE@'; mkfifo pipe.py conftest.py"),
    shell(
        "hard_links_between_files", "rm -f '@TEST_FILE@'; ln README.md '@TEST_FILE@' || ln package.json '@TEST_FILE@'"
    ),
    shell(
        "device_files",
        "mknod null c 1 3; mknod zero.py c 1 5; ln -s /dev/full full; ln -s /dev/zero '@TEST_DIRECTORY@/zero.py'",
    ),
    shell("modes_taken_away", "chmod 000 '@TEST_FILE@'; chmod 555 '@TEST_DIRECTORY@'; chmod 777 '@PACKAGE@'/*"),
    shell("set_user_bits", "cp /bin/sh shell; chmod 6755 shell; chmod 1777 ."),
    shell(
        "package_linked_elsewhere",
        "mkdir -p /tmp/else && cp -r '@PACKAGE@' /tmp/else/ && rm -rf '@PACKAGE@' && ln -s /tmp/else/'@PACKAGE@' .",
    ),
    shell(
        "names_that_confuse",
        "echo > \"$(printf 'a\\nb.py')\"; echo > '-c'; echo > '--co'; echo > ' .py'; echo > '@@.py'",
    ),
)
