#!/bin/sh
# What certificates cost: the same work on three clusters in memory, side by side in one run, all over TCP of the loopback
# address. `plain` has no certificates, `tagged` protects frames against changes, `encrypted` encrypts them.
# Usage: scripts/bench-trust.sh [WEIR] [ROUNDS]   as root, or with FUSE for users
set -eu
weir=${1:-target/release/weir} rounds=${2:-5}
[ -x "$weir" ] || { printf 'error: %s is no program\nhint: make build, or name it\n' "$weir" >&2; exit 2; }
dir=$(mktemp -d /dev/shm/weir-bench-XXXXXX)
pids=
stop() {
    for kind in plain tagged encrypted; do "$weir" unmount "$dir/$kind/mnt" >/dev/null 2>&1 || true; done
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    for pid in $pids; do wait "$pid" 2>/dev/null || true; done
    rm -rf "$dir"
}
trap stop EXIT
trap 'exit 1' INT TERM

# start NAME ARGS…: runs a role and waits until it serves.
start() {
    name=$1; shift
    "$weir" "$@" --pid-file "$dir/$name.pid" 2>"$dir/$name.log" &
    pids="$! $pids"
    while ! grep -q '"ready":true' "$dir/$name.pid" 2>/dev/null; do
        kill -0 "$!" 2>/dev/null || { cat "$dir/$name.log" >&2; exit 1; }
        sleep 0.1
    done
}

plain() {
    at=tcp:127.0.0.1:$1 here=$dir/plain
    mkdir -p "$here/mnt"
    start plain-coord coord --new --dir "$here/coord" --listen "$at" --targets 3 --scheme ec:2+1
    start plain-meta meta --new --name meta --dir "$here/meta" --listen tcp:127.0.0.1:0 --coordinator "$at"
    mkdir "$here/t1" "$here/t2" "$here/t3"
    start plain-storage storage --name storage --dir "$here/t1" --dir "$here/t2" --dir "$here/t3" --listen tcp:127.0.0.1:0 \
        --coordinator "$at"
    start plain-mount mount "$here/mnt" --name mount --coordinator "$at"
}

# certified NAME PORT LINE: in each node's configuration LINE takes the place of its key.
certified() {
    kind=$1 at=tcp:127.0.0.1:$2 line=$3 here=$dir/$1
    mkdir -p "$here/mnt"
    "$weir" init --dir "$here/coord" --listen "$at" --targets 3 --scheme ec:2+1 >/dev/null
    configure "$here/coord/coord.toml"
    start "$kind-coord" coord --config "$here/coord/coord.toml"
    for role in meta storage mount; do
        token=$("$weir" token create --dir "$here/coord" --role $role)
        "$weir" join "$token" --dir "$here/$role" --name $role --mount "$here/mnt" --socket "$here/users.sock" \
            --listen tcp:127.0.0.1:0 --target "$here/t1" --target "$here/t2" --target "$here/t3" >/dev/null
        configure "$here/$role/$role.toml"
    done
    "$weir" access add all --who '*' --root keep --dir "$here/coord" >/dev/null
    start "$kind-meta" meta --new --config "$here/meta/meta.toml"
    start "$kind-storage" storage --config "$here/storage/storage.toml"
    start "$kind-mount" mount --config "$here/mount/mount.toml"
}

# No Unix socket: everything passes over TCP.
configure() {
    sed -i -e 's/"unix:[^"]*",* *//g' "$1"
    [ -z "$line" ] || sed -i "s/^${line%% *} = .*/$line/" "$1"
}

plain 17001
certified tagged 17002 ''
certified encrypted 17003 'trusted_networks = []'
"$weir" bench compare "$dir/plain/mnt" "$dir/tagged/mnt" "$dir/encrypted/mnt" --rounds "$rounds" \
    --rows stream-write,cold-read,create,small-write,small-stat
