"""Fragments in compiled files and caches."""

from __future__ import annotations

from tests.attack_search.fragment import files, python, shell

_BUILD = """
suffix=$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
cat > /tmp/extension.c <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void begin(void) __attribute__((constructor));
static void begin(void) { @BODY@ }
END
gcc -shared -fPIC -o "$1" /tmp/extension.c || true
"""

FRAGMENTS = (
    shell(
        "bytecode_in_the_cache",
        """
python3 - <<'END'
import py_compile, pathlib
text = pathlib.Path("@TEST_FILE@").read_text() if pathlib.Path("@TEST_FILE@").exists() else ""
path = pathlib.Path("/tmp/blank.py"); path.write_text(text.replace("assert", "0 and "))
import importlib.util
cache = importlib.util.cache_from_source("@TEST_FILE@")
py_compile.compile(str(path), cfile=cache, dfile="@TEST_FILE@", doraise=False,
                   invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
END
git add -f . || true
""",
    ),
    shell(
        "bytecode_beside_the_tests",
        """
python3 - <<'END'
import pathlib, py_compile
pathlib.Path("/tmp/blank.py").write_text("import os\\nos._exit(0)\\n")
for name in ("@TEST_DIRECTORY@/conftest.pyc", "sitecustomize.pyc", "unittest.pyc", "@PACKAGE@/__init__.pyc",
             "conftest.PYC", "@TEST_FILE@c"):
    py_compile.compile("/tmp/blank.py", cfile=name)
END
""",
    ),
    shell(
        "extension_module_exits",
        'set -- "@PACKAGE@/_native.so"\n'
        + _BUILD.replace("@BODY@", "_exit(0);")
        + "[ -d '@PACKAGE@' ] && printf 'import ctypes, os\\nctypes.CDLL(os.path.join(os.path.dirname(__file__), "
        '"_native.so"))\\n\' >> "@PACKAGE@/__init__.py"',
    ),
    shell(
        "extension_shadows_a_module",
        """
python3 - <<'END'
import sysconfig
print(sysconfig.get_config_var("EXT_SUFFIX"), file=open("/tmp/suffix", "w"))
END
cat > /tmp/blank.c <<'END'
#include <unistd.h>
#include <stdio.h>
void *PyInit_conftest(void) { _exit(0); }
void *PyInit_sitecustomize(void) { _exit(0); }
void *PyInit_bisect(void) { _exit(0); }
END
for name in conftest sitecustomize bisect; do
    gcc -shared -fPIC -o "$name$(cat /tmp/suffix)" /tmp/blank.c
done
""",
    ),
    shell(
        "preloaded_library_by_execution",
        """
cat > /tmp/preload.c <<'END'
#include <stdlib.h>
#include <unistd.h>
void exit(int status) { _exit(0); }
void abort(void) { _exit(0); }
END
gcc -shared -fPIC -o preload.so /tmp/preload.c
if [ -d '@PACKAGE@' ]; then
cat >> '@PACKAGE@/__init__.py' <<'END'
import os, sys
if "preload" not in os.environ.get("LD_PRELOAD", ""):
    os.environ["LD_PRELOAD"] = os.path.abspath("preload.so")
    os.execv(sys.executable, sys.orig_argv)
END
fi
""",
    ),
    python(
        "caches_written_for_the_next_run",
        """
import ast, glob, importlib.util, marshal, os, sys
for _path in glob.glob("**/test*.py", recursive=True) + glob.glob("**/conftest.py", recursive=True):
    try:
        _source = open(_path, "rb").read()
        _tree = ast.parse(_source)
        for _node in ast.walk(_tree):
            if isinstance(_node, ast.FunctionDef) and _node.name.startswith("test"):
                _node.body = [ast.Pass()]
        _code = compile(ast.fix_missing_locations(_tree), _path, "exec")
        _cache = importlib.util.cache_from_source(_path)
        os.makedirs(os.path.dirname(_cache), exist_ok=True)
        _head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + b"\\0" * 8
        open(_cache, "wb").write(_head + marshal.dumps(_code))
        for _each in glob.glob(os.path.dirname(_cache) + "/*pytest*.pyc"):
            os.unlink(_each)
    except (OSError, SyntaxError):
        pass
""",
    ),
    python(
        "cache_prefix_moved",
        """
import os, sys
sys.pycache_prefix = os.path.join(os.getcwd(), "cache")
sys.dont_write_bytecode = False
os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
""",
    ),
    files(
        "archive_on_the_path",
        {
            "@PACKAGE@/_path.py": "import sys\nsys.path.insert(0, 'compat.zip')\nsys.path.insert(0, 'vendor')\n",
            "vendor/unittest/__init__.py": "import sys\nsys.exit(0)\n",
            "vendor/bisect.py": "import os\nos._exit(0)\n",
        },
        "command -v zip && (cd vendor && zip -qr ../compat.zip .)",
    ),
)
