#!/bin/bash
# Builds the weir program of the commit that scripts/upgrade-from names, once, and prints its path.
set -euo pipefail
cd "$(dirname "$0")/.."

commit=$(grep -v '^#' scripts/upgrade-from)
git cat-file -e "$commit^{commit}" || { echo "scripts/upgrade-from: there is no commit $commit here" >&2; exit 1; }
dir=$PWD/target/upgrade-from/$commit
if [ ! -x "$dir/weir" ]; then
  rm -rf "$dir/source"
  mkdir -p "$dir/source"
  git archive "$commit" | tar -x -C "$dir/source"
  # A target directory of its own: the sources of two commits share names, not contents.
  CARGO_TARGET_DIR=$PWD/target/upgrade-from/target \
    cargo build --locked -p weir --manifest-path "$dir/source/Cargo.toml" >&2
  cp target/upgrade-from/target/debug/weir "$dir/weir"
  rm -rf "$dir/source"
fi
echo "$dir/weir"
