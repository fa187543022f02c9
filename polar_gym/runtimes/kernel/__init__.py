"""Functions of the Linux kernel that keep a sandbox apart, used directly and not through a daemon.

`cgroups`: limits for a sandbox as a whole. `copy_on_write`: a writable view of a directory that stays as it is.
`disk`: a file system for each sandbox. `listener` and `namespace`: a listening socket inside a sandbox's network
namespace. `seccomp` and `syscalls`: the filter of system calls, and the calls that the filter denies. `uids`: a uid of
its own for each sandbox. `subordinate`: the uids that a plain user may give to sandboxes.
"""
