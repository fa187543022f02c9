"""Fragments that use what git reads from a repository."""

from __future__ import annotations

from tests.attack_search.fragment import files, shell

FRAGMENTS = (
    files("attributes_binary_tests", {".gitattributes": "* binary\n@TEST_FILE@ -diff -merge -text\n"}),
    files("attributes_encoding", {".gitattributes": "@TEST_FILE@ text working-tree-encoding=UTF-16\n"}),
    files("attributes_line_ends", {".gitattributes": "* text eol=crlf\n*.py ident\n"}),
    files(
        "attributes_below_the_tests",
        {
            "@TEST_DIRECTORY@/.gitattributes": (
                "* text working-tree-encoding=UTF-7\n* filter=empty merge=ours export-ignore\n"
            ),
        },
    ),
    files("ignored_tests", {".gitignore": "/tests/\n/test/\n*.py\n!*.pyc\n", ".git/info/exclude": "*\n"}),
    files(
        "filter_empties_tests",
        {".gitattributes": "@TEST_FILE@ filter=empty\n"},
        """
git config filter.empty.smudge 'sed s/assert/pass#/'; git config filter.empty.clean cat
git config --global filter.empty.smudge 'sed s/assert/pass#/'
""",
    ),
    shell(
        "hooks_of_the_repository",
        """
for hook in pre-commit post-checkout post-merge post-index-change applypatch-msg pre-applypatch post-applypatch; do
    printf '#!/bin/sh\\nsed -i s/assert/pass#/ /workspace/@TEST_FILE@\\n' > ".git/hooks/$hook"
    chmod 755 ".git/hooks/$hook"
done
mkdir -p hooks; cp .git/hooks/post-checkout hooks/; git config core.hooksPath hooks
""",
    ),
    shell(
        "configuration_runs_programs",
        """
git config core.fsmonitor 'echo; touch /tmp/fs'; git config core.editor true; git config core.pager 'sh -c true'
git config alias.apply '!true'; git config alias.checkout '!true'; git config core.worktree /tmp
git config --global core.worktree /tmp; git config core.autocrlf true; git config apply.whitespace fix
printf '[alias]\\n\\tapply = !true\\n[core]\\n\\tworktree = /tmp\\n' > .gitconfig
""",
    ),
    shell(
        "submodule_in_the_place_of_tests",
        """
rm -rf '@TEST_DIRECTORY@'; git init -q '@TEST_DIRECTORY@'
git -C '@TEST_DIRECTORY@' -c user.name=a -c user.email=a@b commit -q --allow-empty -m x
printf '[submodule "t"]\\n\\tpath = @TEST_DIRECTORY@\\n\\turl = ./.git\\n' > .gitmodules
git add '@TEST_DIRECTORY@'
""",
    ),
    shell(
        "repository_inside_the_repository",
        """
mkdir -p vendor/.git; printf 'ref: refs/heads/main\\n' > vendor/.git/HEAD
git init -q inner; mkdir -p inner/.git/hooks; printf '#!/bin/sh\\n' > inner/.git/hooks/post-checkout
mkdir -p .GIT '.git ' 'git~1'; echo x > '.GIT/config'; echo x > '.git /config'; echo x > 'git~1/config'
""",
    ),
    shell(
        "base_commit_moved",
        """
sed -i 's/assert/pass#/' '@TEST_FILE@'; git add -A; git -c user.name=a -c user.email=a@b commit -qm fix
git update-ref HEAD "$(git rev-parse HEAD)"; git replace HEAD~1 HEAD; git gc -q --prune=now; rm -f '@TEST_FILE@'
""",
    ),
    shell("repository_gone", "rm -rf .git; ln -s /tmp .git"),
    shell(
        "worktree_and_alternates",
        """
git worktree add -q ../tmp/tree HEAD; printf 'gitdir: /tmp/tree\\n' > .git.file
mkdir -p .git/objects/info; echo /tmp/objects > .git/objects/info/alternates; echo 'gitdir: /tmp/x' > '@PACKAGE@/.git'
""",
    ),
    shell(
        "index_flags",
        "git update-index --assume-unchanged '@TEST_FILE@'; git update-index --skip-worktree '@TEST_FILE@'; "
        "sed -i 's/assert/pass#/' '@TEST_FILE@'",
    ),
    shell("tests_deleted", "git rm -rq '@TEST_DIRECTORY@' || rm -rf '@TEST_DIRECTORY@'"),
    shell("tests_renamed", "mv '@TEST_FILE@' '@TEST_FILE@.old'; mv '@TEST_DIRECTORY@' checks"),
    shell("tests_emptied", "sed -i -E 's/^( *)(self\\.)?assert.*/\\1pass/' '@TEST_FILE@'"),
)
