"""The script that node loads before a harness: a bundle's copy of a module of many bytes, and what stays as it is."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

from polar_gym.harnesses import Launch
from polar_gym.harnesses.node import frugal
from tests.support.harness_context import context
from tests.support.requirements import need_node

PRINTS = """
const copied = (module) => {  // as esbuild's bundles copy a module
  const target = Object.defineProperty({}, "default", { value: module, enumerable: true });
  for (const key of Object.getOwnPropertyNames(module))
    if (!Object.hasOwn(target, key)) Object.defineProperty(target, key, { get: () => module[key], enumerable: true });
  return target;
};
const bytes = new Uint8Array(150_000).fill(7);
// A module whose only function, `f`, returns 42.
const wasm = new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 127, 3, 2, 1, 0, 7, 5, 1, 1, 102, 0, 0, 10,
  6, 1, 4, 0, 65, 42, 11]);
const { f } = new WebAssembly.Instance(new WebAssembly.Module(wasm)).exports;
for (let i = 0; i < 3_000_000; i++) f();
console.log(JSON.stringify({
  copy: Object.keys(copied(bytes)),
  same: copied(bytes).default === bytes,
  names: [{ a: 1 }, [5, 6], "ab", new Uint8Array(2), () => 0].map((value) => Object.getOwnPropertyNames(value)),
  answer: f(),
  baseline: %IsLiftoffFunction(f),
  node: parseInt(process.versions.node),
}));
"""


def test_bytes_are_no_properties_and_all_else_is_as_before(tmp_path: Path) -> None:
    """Guards against 1.4 million properties, 4 s of CPU time and 450 MB in each session of Qwen Code."""
    need_node()
    launch = frugal(
        Launch(argv=["node", "--allow-natives-syntax", "-e", PRINTS]),
        dataclasses.replace(context(), home=str(tmp_path)),
    )
    for name, text in launch.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    done = subprocess.run([*launch.argv], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "", "a flag that this node does not know"
    said = json.loads(done.stdout)
    assert said["copy"] == ["default"]
    assert said["same"]
    assert said["names"] == [["a"], ["0", "1", "length"], ["0", "1", "length"], ["0", "1"], ["length", "name"]]
    assert said["answer"] == 42
    assert said["baseline"] or said["node"] >= 22, "a newer node ends without waiting for its compiler"
